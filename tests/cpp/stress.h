// What the programs under sanitizers share: a thread pool in place of XLA's.
#pragma once

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace stress {

// As XLA's: closures run later, on some thread, in order, and maybe long after the phases that they came from.
class Threads {
 public:
  explicit Threads(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Serve(); });
  }
  ~Threads() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  void Schedule(std::function<void()> closure) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(closure));
    }
    changed_.notify_one();
  }

 private:
  void Serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const std::function<void()> closure = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      closure();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::vector<std::thread> threads_;
  bool stopping_ = false;
};

inline void Fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

}  // namespace stress
