// Requests are distributed into parts of a few requests each by slot or bucket of ghosts, and sorted within each part.
// Requests for the same slot or bucket are then adjacent, in an order independent of that of the batch, and no two
// parts share a slot or a bucket.
#include <algorithm>
#include <limits>
#include <vector>

#include "ffi/cpu/cache/bucket.h"
#include "ffi/cpu/prefetch.h"
#include "ffi/cpu/workspace.h"

namespace jax_tt {
namespace {

// Average number of requests per part, and the maximum number of parts of slots and of buckets.
constexpr int64_t kPerPart = 4, kMaxParts = 4096;

// Blocks of the batch that are distributed in parallel; each has a counter for every part.  For few requests, a single
// thread is faster than several that wait for each other.
constexpr int64_t kMinBlock = 16384, kMaxBlocks = 16;

// Requests to prefetch ahead.
constexpr int64_t kAhead = 16;

constexpr int32_t kNowhere = std::numeric_limits<int32_t>::max();

// A range of slots or buckets split into equal parts.
struct Parts {
  int shift = 0;
  int64_t count = 0;

  Parts(int64_t places, int64_t n) {
    const int64_t most = std::clamp<int64_t>(n / kPerPart, 1, kMaxParts);
    while ((places - 1) >> shift >= most) ++shift;
    count = ((places - 1) >> shift) + 1;
  }
};

template <typename K>
struct Request {
  int32_t place;  // bucket, or slot
  K key;          // 0 for a slot

  bool operator<(const Request& other) const { return place != other.place ? place < other.place : key < other.key; }
};

template <typename T>
void SortFew(T* first, T* last) {
  if (last - first > 24) return std::sort(first, last);
  for (T* next = first; next < last; ++next) {
    const T value = *next;
    T* to = next;
    for (; to > first && value < to[-1]; --to) *to = to[-1];
    *to = value;
  }
}

template <typename K>
class Observation {
 public:
  Observation(const CacheDirectory<K>& directory, CachePolicy policy, const K* keys, const int32_t* slots, int64_t n,
              int workers)
      : directory_(directory),
        policy_(policy),
        keys_(keys),
        slots_(slots),
        n_(n),
        buckets_(directory.shape.buckets, n),
        cached_(directory.shape.slots(), n),
        parts_(buckets_.count + cached_.count),
        blocks_(std::clamp<int64_t>(n / kMinBlock, 1, std::min<int64_t>(workers, kMaxBlocks))),
        workers_(static_cast<size_t>(workers)) {}

  Status Prepare() {
    workspace_.Request(&place_, n_);
    workspace_.Request(&requests_, n_);
    workspace_.Request(&news_, n_);
    workspace_.Request(&next_, blocks_ * parts_);
    workspace_.Request(&end_, parts_);
    for (Worker& worker : workers_) workspace_.Request(&worker.rivals, directory_.shape.room + 1);
    return workspace_.Allocate();
  }

  void AddPhases(Phases& phases) {
    const int64_t block = (n_ + blocks_ - 1) / blocks_;
    phases.AddBlocks(n_, block, [=, this](int64_t i, int64_t end, int) { Locate(i, end, Counters(i / block)); });
    phases.Add(1, [=, this](int64_t, int) { Allot((n_ + block - 1) / block); });
    phases.AddBlocks(n_, block, [=, this](int64_t i, int64_t end, int) { Deal(i, end, Counters(i / block)); });
    constexpr int64_t kAtOnce = 64;
    phases.AddBlocks(parts_, kAtOnce, [this](int64_t part, int64_t end, int worker) {
      Worker mine = workers_[static_cast<size_t>(worker)];  // a copy, to avoid false sharing of the counts
      CacheBucketWork<K> work{{directory_.ghost_touched, directory_.ghost_recent}, mine.rivals};
      Prefetch(part, Begin(part), Begin(part) + kAhead);
      for (; part < end; ++part) {
        Prefetch(part, Begin(part) + kAhead, End(part) + kAhead);
        part < buckets_.count ? CountMisses(part, &mine, &work) : CountHits(part, &mine);
      }
      workers_[static_cast<size_t>(worker)] = mine;
    });
  }

  void Finish(int32_t* counts) const {
    int64_t unique_hits = 0, unique_misses = 0, requests = 0;
    for (const Worker& worker : workers_) {
      unique_hits += worker.unique_hits;
      unique_misses += worker.unique_misses;
    }
    for (int64_t i = 0; i < n_; ++i) requests += keys_[i] >= 0;
    counts[kCacheRequests] = static_cast<int32_t>(requests);
    counts[kCacheUnique] = static_cast<int32_t>(unique_hits + unique_misses);
    counts[kCacheMisses] = end_[buckets_.count - 1];
    counts[kCacheUniqueMisses] = static_cast<int32_t>(unique_misses);
  }

 private:
  struct Worker {
    int64_t unique_hits = 0, unique_misses = 0;
    CacheRival<K>* rivals = nullptr;
  };

  int32_t* Counters(int64_t block) const { return next_ + block * parts_; }

  // `place` is a bucket, or the complement of a slot.
  int64_t PartOf(int32_t place) const {
    return place >= 0 ? place >> buckets_.shift : buckets_.count + (~place >> cached_.shift);
  }

  // Finds the slot or bucket of each request of a block, and counts the requests of each part.
  void Locate(int64_t i, int64_t end, int32_t* counters) const {
    std::fill_n(counters, parts_, 0);
    for (; i < end; ++i) {
      if (CacheIsHit(slots_[i], directory_.shape))
        place_[i] = ~slots_[i];
      else if (keys_[i] >= 0)
        place_[i] = static_cast<int32_t>(CacheBucketOf(CacheHash(keys_[i]), directory_.shape));
      else
        place_[i] = kNowhere;
      if (place_[i] != kNowhere) ++counters[PartOf(place_[i])];
    }
  }

  // Converts the counters to the index of each block's first request in each part.
  void Allot(int64_t blocks) const {
    int32_t next = 0;
    for (int64_t part = 0; part < parts_; ++part) {
      for (int64_t block = 0; block < blocks; ++block) {
        int32_t& counter = Counters(block)[part];
        const int32_t count = counter;
        counter = next;
        next += count;
      }
      end_[part] = next;
    }
  }

  void Deal(int64_t i, int64_t end, int32_t* next) const {
    for (; i < end; ++i) {
      const int32_t place = place_[i];
      if (place == kNowhere) continue;
      requests_[next[PartOf(place)]++] = place >= 0 ? Request<K>{place, keys_[i]} : Request<K>{~place, 0};
    }
  }

  Request<K>* Begin(int64_t part) const { return requests_ + (part == 0 ? 0 : end_[part - 1]); }
  Request<K>* End(int64_t part) const { return requests_ + end_[part]; }

  // Prefetches the data of requests of the same kind as those of `part`.
  void Prefetch(int64_t part, const Request<K>* next, const Request<K>* end) const {
    if (part < buckets_.count) {
      for (end = std::min<const Request<K>*>(end, End(buckets_.count - 1)); next < end; ++next)
        Bucket(next->place).Prefetch();
    } else {
      for (end = std::min<const Request<K>*>(end, End(parts_ - 1)); next < end; ++next) {
        PrefetchLines(directory_.scores + next->place, 1);
        PrefetchLines(directory_.touched + next->place, 1);
      }
    }
  }

  CacheBucket<K> Bucket(int32_t bucket) const { return {directory_, policy_, bucket}; }

  void CountMisses(int64_t part, Worker* worker, CacheBucketWork<K>* work) const {
    Request<K>* next = Begin(part);
    Request<K>* const end = End(part);
    CountedKey<K>* const news = news_ + (next - requests_);  // scratch of this part, of the same length
    SortFew(next, end);
    while (next < end) {
      const CacheBucket<K> bucket = Bucket(next->place);
      const int32_t place = next->place;
      int64_t count = 0;
      while (next < end && next->place == place) {
        const Request<K>* const first = next;
        while (next < end && next->place == place && next->key == first->key) ++next;
        ++worker->unique_misses;
        const CountedKey<K> asked{static_cast<int32_t>(next - first), first->key};
        if (!bucket.Feed(asked, work)) news[count++] = asked;
      }
      if (count > 0) bucket.Admit(news, count, work);
    }
  }

  void CountHits(int64_t part, Worker* worker) const {
    Request<K>* next = Begin(part);
    Request<K>* const end = End(part);
    SortFew(next, end);
    while (next < end) {
      const Request<K>* const first = next;
      while (next < end && next->place == first->place) ++next;
      ++worker->unique_hits;
      int32_t& score = directory_.scores[first->place];
      score = CacheScore(score, static_cast<int32_t>(next - first), *directory_.stamp, policy_);
      directory_.touched[first->place] = *directory_.clock;
    }
  }

  const CacheDirectory<K> directory_;
  const CachePolicy policy_;
  const K* const keys_;
  const int32_t* const slots_;
  const int64_t n_;
  const Parts buckets_, cached_;
  const int64_t parts_;  // of buckets, then of slots
  const int64_t blocks_;
  std::vector<Worker> workers_;
  Workspace workspace_;
  int32_t* place_ = nullptr;
  Request<K>* requests_ = nullptr;
  CountedKey<K>* news_ = nullptr;
  int32_t* next_ = nullptr;  // [blocks, parts]
  int32_t* end_ = nullptr;   // [parts]
};

}  // namespace

template <typename K>
Status CacheObserve(const CacheDirectory<K>& directory, CachePolicy policy, const K* keys, const int32_t* slots,
                    int64_t n, const Pool& pool, int32_t* counts) {
  std::fill_n(counts, kCacheCounts, 0);
  if (n == 0) return {};
  Observation<K> observation(directory, policy, keys, slots, n, pool.workers);
  JAX_TT_RETURN_IF_ERROR(observation.Prepare());
  Phases phases;
  observation.AddPhases(phases);
  pool.Run(phases);
  observation.Finish(counts);
  return {};
}

template Status CacheObserve(const CacheDirectory<int32_t>&, CachePolicy, const int32_t*, const int32_t*, int64_t,
                             const Pool&, int32_t*);
template Status CacheObserve(const CacheDirectory<int64_t>&, CachePolicy, const int64_t*, const int32_t*, int64_t,
                             const Pool&, int32_t*);

}  // namespace jax_tt
