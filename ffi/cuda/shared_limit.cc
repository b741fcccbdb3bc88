#include "ffi/cuda/shared_limit.h"

#include "ffi/cuda/cuda_status.h"

#if defined(JAX_TT_EMULATION)

namespace jax_tt {

Status MostShared(size_t* bytes) {
  *bytes = size_t{227} << 10;  // as a Hopper GPU
  return {};
}

}  // namespace jax_tt

#else

#include <cuda_runtime.h>

#include <mutex>
#include <set>
#include <utility>

namespace jax_tt {
namespace {

struct Allowed {
  using KernelOnDevice = std::pair<const void*, int>;
  std::mutex mutex;
  std::set<KernelOnDevice> kernels;
};

// Never destroyed: XLA's threads may launch until the process has gone.
Allowed& TheAllowed() {
  static Allowed* const allowed = new Allowed;
  return *allowed;
}

// An error is reported here: the next launch is not to find it.
Status Reported(cudaError_t error) {
  if (error != cudaSuccess) (void)cudaGetLastError();
  return ToStatus(error);
}

Status MostShared(int device, int* bytes) {
  return Reported(cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
}

}  // namespace

Status MostShared(size_t* bytes) {
  int device = 0, most = 0;
  JAX_TT_RETURN_IF_ERROR(Reported(cudaGetDevice(&device)));
  JAX_TT_RETURN_IF_ERROR(MostShared(device, &most));
  *bytes = static_cast<size_t>(most);
  return {};
}

Status AllowMostShared(const void* kernel) {
  int device = 0, most = 0;
  JAX_TT_RETURN_IF_ERROR(Reported(cudaGetDevice(&device)));
  Allowed& allowed = TheAllowed();
  // Held until the driver has answered, so that whoever finds the kernel here may launch it.
  const std::lock_guard<std::mutex> lock(allowed.mutex);
  if (allowed.kernels.contains({kernel, device})) return {};
  JAX_TT_RETURN_IF_ERROR(MostShared(device, &most));
  JAX_TT_RETURN_IF_ERROR(Reported(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most)));
  allowed.kernels.insert({kernel, device});
  return {};
}

}  // namespace jax_tt

#endif  // JAX_TT_EMULATION
