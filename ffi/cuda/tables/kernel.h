// Kernels that work on one table or on many, each with arguments of its own, and their launches.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <type_traits>
#include <utility>

#include "ffi/cuda/kernel_launch.h"
#include "ffi/cuda/tables/list.h"

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

namespace table_kernel_internal {

// Where a kernel is launched: the emulator is told its name, by which it counts.
#if defined(JAX_TT_EMULATION)
template <auto kKernel>
LaunchSite SiteOf(cudaStream_t stream) {
  LaunchSite site(stream);
  site.kernel = __PRETTY_FUNCTION__;
  return site;
}
#else
template <auto kKernel>
cudaStream_t SiteOf(cudaStream_t stream) {
  return stream;
}
#endif

// `kAsks`: whether the kernel may take more shared memory than every kernel has, which extensions cannot.
template <auto kKernel, int kThreads, bool kAsks, typename Tables>
const char* Enqueue(cudaStream_t stream, int64_t blocks, size_t shared_bytes, const Tables& tables) {
  if constexpr (kAsks)
    return LaunchWord(Launch(SiteOf<kKernel>(stream), blocks, kThreads, shared_bytes, kKernel, tables));
  else
    return LaunchWord(LaunchUnasked(SiteOf<kKernel>(stream), blocks, kThreads, shared_bytes, kKernel, tables));
}

template <typename Args>
ManyTables<Args> ManyOf(const TablesOnDevice& tables) {
  return {static_cast<const Args*>(tables.args), tables.blocks, tables.count};
}

template <typename Args>
constexpr bool kTravels = std::is_trivially_copyable_v<Args> && sizeof(Args) % 8 == 0 && alignof(Args) <= 8;

}  // namespace table_kernel_internal

// `kOne` and `kMany`: a kernel instantiated for OneTable<Args> and for ManyTables<Args>.
template <typename Args, auto kOne, auto kMany, int kThreads>
struct TableKernelOf {
  static_assert(table_kernel_internal::kTravels<Args>);

  static const char* One(cudaStream_t stream, int64_t blocks, size_t shared_bytes, const void* args) {
    const OneTable<Args> one{*static_cast<const Args*>(args)};
    return table_kernel_internal::Enqueue<kOne, kThreads, true>(stream, blocks, shared_bytes, one);
  }
  static const char* Many(cudaStream_t stream, int64_t blocks, size_t shared_bytes, const TablesOnDevice& tables) {
    const auto many = table_kernel_internal::ManyOf<Args>(tables);
    return table_kernel_internal::Enqueue<kMany, kThreads, true>(stream, blocks, shared_bytes, many);
  }
  static constexpr TableKernel kKernel{One, Many};
};

// For kernels of which there are too many to compile them twice.  `kEither`: one that takes a TableList<Args>.
template <typename Args, auto kEither, int kThreads>
struct ListKernelOf {
  static_assert(table_kernel_internal::kTravels<Args>);

  static const char* One(cudaStream_t stream, int64_t blocks, size_t shared_bytes, const void* args) {
    const TableList<Args> list{{*static_cast<const Args*>(args)}, {}};
    return table_kernel_internal::Enqueue<kEither, kThreads, false>(stream, blocks, shared_bytes, list);
  }
  static const char* Many(cudaStream_t stream, int64_t blocks, size_t shared_bytes, const TablesOnDevice& tables) {
    const TableList<Args> list{{}, table_kernel_internal::ManyOf<Args>(tables)};
    return table_kernel_internal::Enqueue<kEither, kThreads, false>(stream, blocks, shared_bytes, list);
  }
  static constexpr TableKernel kKernel{One, Many};
};

}  // namespace jax_tt
