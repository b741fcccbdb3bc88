// Division by a number that many dividends share.
#ifndef JAX_TT_CORE_DIVIDER_H_
#define JAX_TT_CORE_DIVIDER_H_

#include <stdint.h>

#include "ffi/core/host_device.h"

namespace jax_tt {

// A dividend below 2^32 is divided by one multiplication, a tenth of a division's time: with m = floor(2^64 / p) + 1
// the product a m exceeds 2^64 a / p by less than 2^32 < 2^64 / p, too little to reach the next quotient.
class Divider {
 public:
  Divider() = default;
  explicit Divider(uint64_t divisor)
      : divisor_(divisor), factor_(divisor > 1 && divisor >> 32 == 0 ? UINT64_MAX / divisor + 1 : 0) {
    // UINT64_MAX / p is floor(2^64 / p), but for powers of two, which divide 2^64: one less.
    if (factor_ != 0 && (divisor & (divisor - 1)) == 0) ++factor_;
  }

  JAX_TT_INLINE uint64_t Quotient(uint64_t dividend) const {
    if (factor_ == 0 || dividend >> 32 != 0) return dividend / divisor_;
    return static_cast<uint64_t>(static_cast<Wide>(dividend) * factor_ >> 64);
  }
  JAX_TT_INLINE uint64_t divisor() const { return divisor_; }

 private:
  __extension__ typedef unsigned __int128 Wide;

  uint64_t divisor_ = 1, factor_ = 0;
};

}  // namespace jax_tt

#endif  // JAX_TT_CORE_DIVIDER_H_
