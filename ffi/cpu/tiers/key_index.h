// Numbers by 64-bit key, in the memory of the host.
#pragma once

#include <stdint.h>

#include <vector>

namespace jax_tt {

// A map whose memory grows with its keys, a little at a time, so that no call takes much longer than others.  A number
// is at least 0.
//
// Keys are in segments of a few thousand places, each a table with linear probing.  A segment that is half full becomes
// two.  The first bits of a hash say the segment, by a directory that doubles when a segment needs one bit more than
// others have (extendible hashing); the last bits say the place.
class KeyIndex {
 public:
  int64_t size() const { return size_; }

  // The number of every key, or -1.
  void Find(const uint64_t* keys, int64_t n, int64_t* numbers) const;

  // Also says the numbers that the keys had before, or -1.  Of equal keys, the last one counts.
  void Set(const uint64_t* keys, const int64_t* numbers, int64_t n, int64_t* before);

  // Also says the numbers that the keys had, or -1.
  void Erase(const uint64_t* keys, int64_t n, int64_t* before);

 private:
  struct Entry {
    uint64_t key;
    int64_t number;  // -1 where the entry is empty
  };
  struct Segment {
    std::vector<Entry> entries;  // a power of two
    int64_t size = 0;
    int bits = 0;  // of a hash that all keys in it have in common

    bool full() const { return 2 * (size + 1) > static_cast<int64_t>(entries.size()); }
    uint64_t mask() const { return entries.size() - 1; }
    // The entry of a key, or the empty one that ends the search.
    const Entry& At(uint64_t hash, uint64_t key) const;
    Entry& At(uint64_t hash, uint64_t key) {
      return const_cast<Entry&>(static_cast<const Segment&>(*this).At(hash, key));
    }
    void Erase(Entry* entry);
  };

  static uint64_t Hash(uint64_t key);
  uint64_t PlaceOf(uint64_t hash) const { return bits_ == 0 ? 0 : hash >> (64 - bits_); }
  const Segment& SegmentOf(uint64_t hash) const { return segments_[directory_[PlaceOf(hash)]]; }
  Segment& SegmentOf(uint64_t hash) { return segments_[directory_[PlaceOf(hash)]]; }
  void Prefetch(const uint64_t* keys, int64_t k, int64_t n) const;
  // More places for keys of this hash.
  void Grow(uint64_t hash);
  void Split(uint64_t hash);
  void Move(const std::vector<Entry>& entries);

  int64_t size_ = 0;
  int bits_ = 0;
  std::vector<uint32_t> directory_ = {0};  // [2^bits]
  std::vector<Segment> segments_ = {{std::vector<Entry>(64, Entry{0, -1})}};
};

}  // namespace jax_tt
