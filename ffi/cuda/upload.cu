#include <algorithm>

#include "ffi/cuda/upload.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256;

// What the parameters of a kernel hold everywhere, and what they hold from CUDA 12.1 on, each less the other
// parameters.
constexpr int kSmallWords = (4096 - 16) / 4, kLargeWords = (32764 - 20) / 4;

// Runs of 32 words, without those that are zero: most are, halves of sizes and places of arrays that are not in use.
// First two words for each run, which of its words are here, as bits, and the place of the first; then all words.
template <int kWords>
struct Piece {
  uint32_t word[kWords];
};

template <int kWords>
__global__ void __launch_bounds__(kThreads)
    WritePiece(const __grid_constant__ Piece<kWords> piece, int count, uint32_t* to) {
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i >= count) return;
  const int run = i / 32;
  const uint32_t here = piece.word[2 * run], bit = 1u << i % 32;
  to[i] = (here & bit) == 0 ? 0 : piece.word[piece.word[2 * run + 1] + __popc(here & (bit - 1))];
}

// What a piece holds from the beginning of these words on.
struct Fitting {
  int64_t words = 0;
  int runs = 0;

  Fitting(const uint32_t* from, int64_t count, int most) {
    for (int taken = 0; words < count; ++runs) {
      const int64_t end = std::min(words + 32, count);
      taken += 2 + static_cast<int>(end - words - std::count(from + words, from + end, 0u));
      if (taken > most) return;
      words = end;
    }
  }
};

template <int kWords>
Status UploadPiece(cudaStream_t stream, const uint32_t* from, const Fitting& fitting, uint32_t* to) {
  Piece<kWords> piece{};
  uint32_t place = 2 * static_cast<uint32_t>(fitting.runs);
  for (int64_t i = 0; i < fitting.words; ++i) {
    uint32_t* const run = piece.word + i / 32 * 2;
    if (i % 32 == 0) run[1] = place;
    if (from[i] == 0) continue;
    run[0] |= 1u << i % 32;
    piece.word[place++] = from[i];
  }
  const int count = static_cast<int>(fitting.words);
  return Launch(stream, (count + kThreads - 1) / kThreads, kThreads, 0, WritePiece<kWords>, piece, count, to);
}

// Whether compiler and driver know large parameters.
bool TakesLargePieces() {
#if defined(JAX_TT_EMULATION)
  return true;
#elif CUDART_VERSION >= 12010
  static const bool takes = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12010;
  }();
  return takes;
#else
  return false;
#endif
}

}  // namespace

Status Upload(cudaStream_t stream, const uint32_t* from, int64_t count, uint32_t* to) {
  while (count > 0) {
    // A few words are not worth the time that large parameters take.
    Fitting fitting(from, count, kSmallWords);
    const bool large = fitting.words < count && TakesLargePieces();
#if defined(JAX_TT_EMULATION) || CUDART_VERSION >= 12010
    if (large) {
      fitting = Fitting(from, count, kLargeWords);
      JAX_TT_RETURN_IF_ERROR(UploadPiece<kLargeWords>(stream, from, fitting, to));
    }
#endif
    if (!large) JAX_TT_RETURN_IF_ERROR(UploadPiece<kSmallWords>(stream, from, fitting, to));
    from += fitting.words;
    to += fitting.words;
    count -= fitting.words;
  }
  return {};
}

}  // namespace jax_tt
