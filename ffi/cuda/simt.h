// The only way by which device code sees CUDA: CUDA itself, or, with JAX_TT_EMULATION, the SIMT emulator, which runs
// the same sources on any machine and checks what hardware does not.
//
// Beside CUDA's own names, of which emulation/ holds the list, kernels use:
//   Shared<T>            T* into shared memory, which is always dynamic
//   SharedArena          hands it out: arena.Take<T>(count), the same in every thread of the block
//   SharedBytes<T>(n)    what Take<T>(n) takes; their sum is the `shared_bytes` of Launch
//   Load4, Store4        four floats at once, of global or shared memory aligned to 16 bytes
//   Launch(stream, blocks, threads, shared_bytes, kernel, args...)
//                        of no blocks launches one that does nothing: XLA may capture what a handler enqueues, and
//                        older versions refuse a capture that stays empty
//   LaunchUnasked        the same with little shared memory, for headers that extensions include: of the library, it
//                        needs nothing that has to be linked
#pragma once

#include <cstddef>
#include <cstdint>

namespace jax_tt {

template <typename T>
constexpr size_t SharedBytes(int64_t count) {
  return (static_cast<size_t>(count) * sizeof(T) + 15) / 16 * 16;
}

}  // namespace jax_tt

#if defined(JAX_TT_EMULATION)

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

#include "ffi/emulation/atomics.h"
#include "ffi/emulation/current.h"
#include "ffi/emulation/intrinsics.h"
#include "ffi/emulation/launch.h"
#include "ffi/emulation/shared_memory.h"
#include "ffi/emulation/vector_types.h"

#else

#include <cuda_runtime.h>

#include <string>
#include <utility>

#include "ffi/common/status.h"
#include "ffi/cuda/shared_limit.h"

#if defined(__CUDACC__)

namespace jax_tt {

template <typename T>
using Shared = T*;

class SharedArena {
 public:
  template <typename T>
  __device__ __forceinline__ Shared<T> Take(int64_t count) {
    extern __shared__ __align__(16) unsigned char jax_tt_shared_memory[];
    T* const taken = reinterpret_cast<T*>(jax_tt_shared_memory + offset_);
    offset_ += (static_cast<unsigned>(count) * static_cast<unsigned>(sizeof(T)) + 15) / 16 * 16;
    return taken;
  }

 private:
  unsigned offset_ = 0;
};

__device__ __forceinline__ float4 Load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ void Store4(float* p, float4 value) { *reinterpret_cast<float4*>(p) = value; }

// Beside the kernels that work, one for launches of no blocks.  A template, so that many sources may have it.
template <typename = void>
__global__ void DoNothing() {}

// A launch that the runtime refuses names the kernel; what goes wrong while it runs shows up in the stream.
template <typename... Params, typename... Args>
Status LaunchUnasked(cudaStream_t stream, int64_t blocks, int threads, size_t shared_bytes, void (*kernel)(Params...),
                     Args&&... args) {
  if (blocks == 0) return LaunchUnasked(stream, 1, 1, 0, DoNothing<>);
  if (blocks < 0 || blocks > INT32_MAX) return Internal("a grid of " + std::to_string(blocks) + " blocks");
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // reported here: the next launch is not to find it
  const char* name = "a kernel";
#if CUDART_VERSION >= 12030
  if (cudaFuncGetName(&name, reinterpret_cast<const void*>(kernel)) != cudaSuccess) name = "a kernel";
#endif
  return Internal(std::string("launch of ") + name + ": " + cudaGetErrorString(error));
}

template <typename... Params, typename... Args>
Status Launch(cudaStream_t stream, int64_t blocks, int threads, size_t shared_bytes, void (*kernel)(Params...),
              Args&&... args) {
  if (shared_bytes > kSharedUnasked) JAX_TT_RETURN_IF_ERROR(AllowMostShared(reinterpret_cast<const void*>(kernel)));
  return LaunchUnasked(stream, blocks, threads, shared_bytes, kernel, std::forward<Args>(args)...);
}

}  // namespace jax_tt

#endif  // __CUDACC__
#endif  // JAX_TT_EMULATION
