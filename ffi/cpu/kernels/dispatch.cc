#include <cstdlib>
#include <cstring>

#include "ffi/cpu/kernels/coded_kernels.h"
#include "ffi/cpu/kernels/hash_kernels.h"
#include "ffi/cpu/kernels/kernels.h"
#include "ffi/cpu/kernels/quantized_kernels.h"
#include "ffi/cpu/kernels/scan_kernels.h"
#include "ffi/cpu/kernels/search_kernels.h"

namespace jax_tt {
namespace {

enum class Isa { kBaseline, kV3, kV4 };

Isa DetectIsa() {
  Isa best = Isa::kBaseline;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    best = Isa::kV3;
  if (best == Isa::kV3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    best = Isa::kV4;
#endif
  if (const char* wanted = std::getenv("JAX_TT_CPU_ISA")) {
    if (!std::strcmp(wanted, "baseline")) return Isa::kBaseline;
    if (!std::strcmp(wanted, "x86_64_v3") && best == Isa::kV4) return Isa::kV3;
  }
  return best;
}

Isa ChosenIsa() {
  static const Isa isa = DetectIsa();
  return isa;
}

}  // namespace

#if defined(__x86_64__)
#define JAX_TT_CHOOSE(member)   \
  switch (ChosenIsa()) {        \
    case Isa::kV4:              \
      return x86_64_v4::member; \
    case Isa::kV3:              \
      return x86_64_v3::member; \
    case Isa::kBaseline:        \
      return baseline::member;  \
  }                             \
  return baseline::member
#else
#define JAX_TT_CHOOSE(member) return baseline::member
#endif

template <>
const Kernels<float>& GetKernels<float>() {
  JAX_TT_CHOOSE(kFloat);
}
template <>
const Kernels<double>& GetKernels<double>() {
  JAX_TT_CHOOSE(kDouble);
}
const HashKernels& GetHashKernels() { JAX_TT_CHOOSE(kHash); }
const QuantizedKernels& GetQuantizedKernels() { JAX_TT_CHOOSE(kQuantized); }
SearchCodes GetSearchCodes() { JAX_TT_CHOOSE(kSearchCodes); }
SumCodedBags GetSumCodedBags() { JAX_TT_CHOOSE(kSumCoded); }
const ScanKernels& GetScanKernels() { JAX_TT_CHOOSE(kScan); }

}  // namespace jax_tt
