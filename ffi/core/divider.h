// Division by a number that many dividends share.
#pragma once

#include <stdint.h>

#include "ffi/core/host_device.h"

namespace jax_tt {

// Where both are below 2^32, dividing is one multiplication, a tenth of a division's time: with m = floor(2^64 / p) +
// 1, or 2^64 / p where p is a power of two, the product a m exceeds 2^64 a / p by less than 2^32 < 2^64 / p, too little
// to reach the next quotient.
class Divider {
 public:
  Divider() = default;
  explicit Divider(uint64_t divisor) : divisor_(divisor), factor_(UINT64_MAX / divisor) {}

  JAX_TT_INLINE uint64_t Quotient(uint64_t dividend) const {
    if ((dividend | divisor_) >> 32 != 0) return dividend / divisor_;
    return static_cast<uint64_t>((static_cast<Wide>(dividend) * factor_ + dividend) >> 64);
  }
  JAX_TT_INLINE uint64_t divisor() const { return divisor_; }

 private:
  __extension__ typedef unsigned __int128 Wide;

  uint64_t divisor_ = 1, factor_ = UINT64_MAX;  // m - 1: that of 1 would not fit
};

}  // namespace jax_tt
