#include <algorithm>

#include "ffi/cuda/upload.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256;

// What the parameters of a kernel hold everywhere, and what they hold from CUDA 12.1 on, each less the other
// parameters.
constexpr int kSmallWords = (4096 - 16) / 4, kLargeWords = (32764 - 20) / 4;

template <int kWords>
struct Piece {
  uint32_t word[kWords];
};

template <int kWords>
__global__ void __launch_bounds__(kThreads)
    WritePiece(const __grid_constant__ Piece<kWords> piece, int count, uint32_t* to) {
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i < count) to[i] = piece.word[i];
}

template <int kWords>
Status UploadPiece(cudaStream_t stream, const uint32_t* from, int count, uint32_t* to) {
  Piece<kWords> piece{};
  std::copy_n(from, count, piece.word);
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
    const bool large = count > kSmallWords && TakesLargePieces();
    const int taken = static_cast<int>(std::min<int64_t>(count, large ? kLargeWords : kSmallWords));
#if defined(JAX_TT_EMULATION) || CUDART_VERSION >= 12010
    if (large) JAX_TT_RETURN_IF_ERROR(UploadPiece<kLargeWords>(stream, from, taken, to));
#endif
    if (!large) JAX_TT_RETURN_IF_ERROR(UploadPiece<kSmallWords>(stream, from, taken, to));
    from += taken;
    to += taken;
    count -= taken;
  }
  return {};
}

}  // namespace jax_tt
