// Rows of hash tables: initial values and exchange.
#include "ffi/cuda/dense/lanes.h"
#include "ffi/cuda/hash/hash.h"

namespace jax_tt {
namespace {

// Elements that a lane makes at a time: those of two counters.
constexpr int kElements = 4;

// The lanes of a row share its elements.
template <typename T>
__global__ void __launch_bounds__(kDenseThreads)
    WriteInitialRows(const __grid_constant__ HashInitialArrays values, const __grid_constant__ HashBatch batch,
                     int64_t features, bool four_wide, T* rows) {
  const RowLanes lanes = RowLanes::For(features, kElements);
  const int64_t i = lanes.row(blockIdx.x);
  if (i >= batch.n || !batch.present[i]) return;
  uint32_t high = batch.keys[2 * i], low = batch.keys[2 * i + 1];
  Threefry(values.seed[0], values.seed[1], &high, &low);
  const float scale = *values.scale;
  for (int64_t begin = lanes.lane() * kElements; begin < features; begin += lanes.count * kElements) {
    Packet<T, kElements> packet;
#pragma unroll
    for (int pair = 0; pair < kElements / 2; ++pair) {
      uint32_t bits[2] = {static_cast<uint32_t>(begin / 2 + pair), 0};
      Threefry(high, low, &bits[0], &bits[1]);
#pragma unroll
      for (int k = 0; k < 2; ++k)
        // Not contracted with what rounds it, so that all platforms have the same bits.
        Round(__fmul_rn(static_cast<float>(InitialElement(bits[k], values.quantiles, values.with_sign)), scale),
              &packet.x[2 * pair + k]);
    }
    T* const to = rows + i * features + begin;
    if (four_wide) {
      StorePacket(packet, to);
      continue;
    }
#pragma unroll
    for (int k = 0; k < kElements; ++k)
      if (begin + k < features) to[k] = packet.x[k];
  }
}

// The lanes of an entry share its words.
template <typename Word>
__global__ void __launch_bounds__(kDenseThreads)
    TakeEntries(const Word* entries, int64_t words, const __grid_constant__ HashSlots slots, Word* old) {
  const RowLanes lanes = RowLanes::For(words, 1);
  const int64_t i = lanes.row(blockIdx.x);
  if (i >= slots.n) return;
  const int32_t slot = slots.slots[i];
  for (int64_t k = lanes.lane(); k < words; k += lanes.count)
    old[i * words + k] = slots.IsValid(slot) ? entries[slot * words + k] : Word{};
}

template <typename Word>
__global__ void __launch_bounds__(kDenseThreads)
    PutEntries(const Word* from, bool constant, int64_t words, const __grid_constant__ HashSlots slots, Word* entries) {
  const RowLanes lanes = RowLanes::For(words, 1);
  const int64_t i = lanes.row(blockIdx.x);
  if (i >= slots.n) return;
  const int32_t slot = slots.slots[i];
  if (!slots.IsValid(slot)) return;
  for (int64_t k = lanes.lane(); k < words; k += lanes.count)
    entries[slot * words + k] = from[constant ? 0 : i * words + k];
}

// Calls body(Word{}) with the widest word that divides this many bytes and at whose multiples these addresses lie.
template <typename F>
Status DispatchWord(int64_t bytes, const char* one, const char* other, F&& body) {
  const uint64_t all =
      static_cast<uint64_t>(bytes) | reinterpret_cast<uintptr_t>(one) | reinterpret_cast<uintptr_t>(other);
  if (all % 16 == 0) return body(int4{});
  if (all % 8 == 0) return body(int2{});
  if (all % 4 == 0) return body(int32_t{});
  if (all % 2 == 0) return body(int16_t{});
  return body(int8_t{});
}

Status Put(cudaStream_t stream, const HashArray& array, const HashSlots& slots) {
  const int64_t bytes = array.constant ? array.item_bytes : array.entry_bytes;
  return DispatchWord(bytes, array.from, array.entries, [&](auto word) {
    using Word = decltype(word);
    const int64_t words = array.entry_bytes / static_cast<int64_t>(sizeof(Word));
    return Launch(stream, RowLanes::For(words, 1).blocks(slots.n), kDenseThreads, 0, PutEntries<Word>,
                  reinterpret_cast<const Word*>(array.from), array.constant, words, slots,
                  reinterpret_cast<Word*>(array.entries));
  });
}

}  // namespace

template <typename T>
Status HashInitial(cudaStream_t stream, const HashInitialArrays& values, const HashBatch& batch, int64_t features,
                   T* rows) {
  return Launch(stream, RowLanes::For(features, kElements).blocks(batch.n), kDenseThreads, 0, WriteInitialRows<T>,
                values, batch, features, FourWide(features, rows), rows);
}

template Status HashInitial(cudaStream_t, const HashInitialArrays&, const HashBatch&, int64_t, float*);
template Status HashInitial(cudaStream_t, const HashInitialArrays&, const HashBatch&, int64_t, bfloat16*);
template Status HashInitial(cudaStream_t, const HashInitialArrays&, const HashBatch&, int64_t, float16*);

Status HashTake(cudaStream_t stream, const char* entries, int64_t entry_bytes, const HashSlots& slots, char* old) {
  return DispatchWord(entry_bytes, entries, old, [&](auto word) {
    using Word = decltype(word);
    const int64_t words = entry_bytes / static_cast<int64_t>(sizeof(Word));
    return Launch(stream, RowLanes::For(words, 1).blocks(slots.n), kDenseThreads, 0, TakeEntries<Word>,
                  reinterpret_cast<const Word*>(entries), words, slots, reinterpret_cast<Word*>(old));
  });
}

Status HashExchange(cudaStream_t stream, const std::vector<HashArray>& arrays, const HashSlots& slots) {
  for (const HashArray& array : arrays) {
    if (array.old != nullptr)
      JAX_TT_RETURN_IF_ERROR(HashTake(stream, array.entries, array.entry_bytes, slots, array.old));
    JAX_TT_RETURN_IF_ERROR(Put(stream, array, slots));
  }
  return {};
}

}  // namespace jax_tt
