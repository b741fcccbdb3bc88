// As much of the CUDA runtime as a launch needs, for a host without one: it runs nothing, keeps the limits of shared
// memory as a driver does, and counts.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __CUDACC__ 1

struct float4 {
  float x, y, z, w;
};
struct dim3 {
  dim3(unsigned x = 1) : x(x) {}
  unsigned x;
};
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace fake_cuda {

struct Driver {
  std::mutex mutex;
  std::map<std::pair<const void*, int>, int> limits;  // of kernels on devices
  int limits_set = 0;
  int launches = 0;
};
inline Driver driver;
inline thread_local int device = 0;
constexpr int kMostShared = 227 << 10;

}  // namespace fake_cuda

inline const char* cudaGetErrorString(cudaError_t) { return "invalid argument"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = fake_cuda::device;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = fake_cuda::kMostShared;
  return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int bytes) {
  if (bytes > fake_cuda::kMostShared) return cudaErrorInvalidValue;
  const std::lock_guard<std::mutex> lock(fake_cuda::driver.mutex);
  fake_cuda::driver.limits[{kernel, fake_cuda::device}] = bytes;
  ++fake_cuda::driver.limits_set;
  return cudaSuccess;
}
template <typename... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute, int bytes) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, bytes);
}
template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&...) {
  std::this_thread::yield();  // other threads have their turn between what a launch prepares and the launch
  const std::lock_guard<std::mutex> lock(fake_cuda::driver.mutex);
  const auto found = fake_cuda::driver.limits.find({reinterpret_cast<const void*>(kernel), fake_cuda::device});
  const size_t limit = found == fake_cuda::driver.limits.end() ? size_t{48} << 10 : static_cast<size_t>(found->second);
  if (config->gridDim.x == 0 || config->dynamicSmemBytes > limit) return cudaErrorInvalidValue;
  ++fake_cuda::driver.launches;
  return cudaSuccess;
}
