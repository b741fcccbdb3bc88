// Kernels that work on one table or on many, each with arguments of its own, and their launches.
#ifndef JAX_TT_CUDA_TABLE_KERNEL_H_
#define JAX_TT_CUDA_TABLE_KERNEL_H_

#include <stddef.h>
#include <stdint.h>

#include <type_traits>
#include <utility>

#include "ffi/cuda/kernel_launch.h"
#include "ffi/cuda/table_list.h"

namespace jax_tt {

// What a launch on many tables finds on the device: the arguments of the tables and the list of their blocks.
struct TablesOnDevice {
  const void* args;
  const TableBlocks* blocks;
  int count;
};

// The two launches of a kernel; they return null, or what went wrong, as a KernelLaunch does.  `args`: of the table.
struct TableKernel {
  const char* (*one)(cudaStream_t stream, int64_t blocks, size_t shared_bytes, const void* args);
  const char* (*many)(cudaStream_t stream, int64_t blocks, size_t shared_bytes, const TablesOnDevice& tables);
};

inline const char* LaunchWord(Status status) {
  if (status.ok()) return nullptr;
  LaunchTrouble() = std::move(status.message);
  return LaunchTrouble().c_str();
}

// `kOne` and `kMany`: a kernel instantiated for OneTable<Args> and for ManyTables<Args>.  `kAsks`: whether it may take
// more shared memory than every kernel has, which extensions cannot.
template <typename Args, auto kOne, auto kMany, int kThreads, bool kAsks = true>
struct TableKernelOf {
  static_assert(std::is_trivially_copyable_v<Args> && sizeof(Args) % 8 == 0 && alignof(Args) <= 8);

  static const char* One(cudaStream_t stream, int64_t blocks, size_t shared_bytes, const void* args) {
    return Enqueue(stream, blocks, shared_bytes, kOne, OneTable<Args>{*static_cast<const Args*>(args)});
  }
  static const char* Many(cudaStream_t stream, int64_t blocks, size_t shared_bytes, const TablesOnDevice& tables) {
    const ManyTables<Args> many{static_cast<const Args*>(tables.args), tables.blocks, tables.count};
    return Enqueue(stream, blocks, shared_bytes, kMany, many);
  }
  static constexpr TableKernel kKernel{One, Many};

 private:
  template <typename Kernel, typename Tables>
  static const char* Enqueue(cudaStream_t stream, int64_t blocks, size_t shared_bytes, Kernel kernel,
                             const Tables& tables) {
    if constexpr (kAsks)
      return LaunchWord(Launch(stream, blocks, kThreads, shared_bytes, kernel, tables));
    else
      return LaunchWord(LaunchUnasked(stream, blocks, kThreads, shared_bytes, kernel, tables));
  }
};

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_TABLE_KERNEL_H_
