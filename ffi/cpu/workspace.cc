#include "ffi/cpu/workspace.h"

#include <cstdlib>
#include <mutex>
#include <string>

#include "ffi/cpu/huge_pages.h"

namespace jax_tt {
namespace {

// Page faults in new memory cost more than the work itself, so blocks of finished operations are kept for reuse, up to
// this many bytes.
constexpr int64_t kKeptBytes = int64_t{96} << 20;

struct Block {
  void* memory;
  int64_t size;
};

// Large blocks use huge pages if available: the gradients of shared slices are read in an order that would otherwise
// miss the TLB at every step.
Block Allocate(int64_t size) {
  if (size < 2 * kHugePage) return {std::aligned_alloc(64, static_cast<size_t>(size)), size};
  size = (size + kHugePage - 1) / kHugePage * kHugePage;
  void* memory = std::aligned_alloc(kHugePage, static_cast<size_t>(size));
  if (memory != nullptr) PreferHugePages(memory, size);
  return {memory, size};
}

class BlockCache {
 public:
  BlockCache() { blocks_.reserve(64); }  // returning a block must not allocate

  Block Take(int64_t size) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      size_t best = blocks_.size();
      for (size_t i = 0; i < blocks_.size(); ++i)
        if (blocks_[i].size >= size && (best == blocks_.size() || blocks_[i].size < blocks_[best].size)) best = i;
      if (best < blocks_.size()) {
        const Block block = blocks_[best];
        blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(best));
        kept_ -= block.size;
        return block;
      }
    }
    return Allocate(size);
  }

  void Return(Block block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (blocks_.size() == blocks_.capacity()) return std::free(block.memory);
    blocks_.push_back(block);
    kept_ += block.size;
    while (kept_ > kKeptBytes) {  // frees the oldest first
      std::free(blocks_.front().memory);
      kept_ -= blocks_.front().size;
      blocks_.erase(blocks_.begin());
    }
  }

 private:
  std::mutex mutex_;
  std::vector<Block> blocks_;
  int64_t kept_ = 0;
};

BlockCache& Cache() {
  static BlockCache* const cache = new BlockCache;  // outlives every thread that may still return a block
  return *cache;
}

}  // namespace

Status Workspace::Allocate() {
  if (size_ == 0) return {};
  const Block block = Cache().Take(size_);
  if (block.memory == nullptr)
    return ResourceExhausted("cannot allocate " + std::to_string(size_) + " bytes of temporary memory");
  block_ = block.memory;
  block_size_ = block.size;
  for (const Pending& pending : requests_) *pending.where = static_cast<char*>(block_) + pending.offset;
  return {};
}

Workspace::~Workspace() {
  if (block_ != nullptr) Cache().Return({block_, block_size_});
}

}  // namespace jax_tt
