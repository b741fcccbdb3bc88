// Numbers by 64-bit key, in the memory of the host.
#ifndef JAX_TT_CPU_KEY_INDEX_H_
#define JAX_TT_CPU_KEY_INDEX_H_

#include <stdint.h>

#include <vector>

namespace jax_tt {

// A map with linear probing, whose memory grows with its keys. A number is at least 0.
class KeyIndex {
 public:
  int64_t size() const { return size_; }

  // The number of every key, or -1.
  void Find(const uint64_t* keys, int64_t n, int64_t* numbers) const;

  // Of equal keys, the last one counts.
  void Set(const uint64_t* keys, const int64_t* numbers, int64_t n);

  // Keys that are not there are ignored.
  void Erase(const uint64_t* keys, int64_t n);

 private:
  struct Entry {
    uint64_t key;
    int64_t number;  // -1 where the entry is empty
  };

  uint64_t Home(uint64_t key) const;
  // Of the entry of the key, or of the empty one that ends the search.
  uint64_t Place(uint64_t key) const;
  void Prefetch(const uint64_t* keys, int64_t k, int64_t n) const;
  void Reserve(int64_t count);
  void EraseAt(uint64_t hole);

  std::vector<Entry> entries_ = std::vector<Entry>(64, Entry{0, -1});
  int64_t size_ = 0;
};

}  // namespace jax_tt

#endif  // JAX_TT_CPU_KEY_INDEX_H_
