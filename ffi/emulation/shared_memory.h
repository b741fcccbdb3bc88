// Shared memory of the emulated block: a pointer whose every access is checked against bounds and history.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "ffi/emulation/scheduler.h"
#include "ffi/emulation/shadow.h"
#include "ffi/emulation/vector_types.h"

namespace jax_tt {

template <typename T>
class Shared;

namespace emulation {

// What p[i] is.  It converts to the value only while it is a temporary: `auto x = p[i]` would be a value in CUDA and
// a reference here, and so does not compile past its first use.
template <typename T>
class SharedElement {
 public:
  SharedElement(Region* region, int64_t index) : region_(region), index_(index) {}
  SharedElement(const SharedElement&) = default;

  operator T() && { return Read(); }
  T operator=(T value) && { return Write(value); }
  T operator=(SharedElement&& other) && { return Write(other.Read()); }
  template <typename U>
  T operator+=(U&& value) && {
    return Write(static_cast<T>(Read() + std::forward<U>(value)));
  }
  template <typename U>
  T operator-=(U&& value) && {
    return Write(static_cast<T>(Read() - std::forward<U>(value)));
  }
  template <typename U>
  T operator*=(U&& value) && {
    return Write(static_cast<T>(Read() * std::forward<U>(value)));
  }
  template <typename U>
  T operator/=(U&& value) && {
    return Write(static_cast<T>(Read() / std::forward<U>(value)));
  }
  template <typename U>
  T operator|=(U&& value) && {
    return Write(static_cast<T>(Read() | std::forward<U>(value)));
  }
  template <typename U>
  T operator&=(U&& value) && {
    return Write(static_cast<T>(Read() & std::forward<U>(value)));
  }
  template <typename U>
  T operator^=(U&& value) && {
    return Write(static_cast<T>(Read() ^ std::forward<U>(value)));
  }
  T operator++() && { return Write(static_cast<T>(Read() + 1)); }
  T operator--() && { return Write(static_cast<T>(Read() - 1)); }
  T operator++(int) && {
    const T old = Read();
    Write(static_cast<T>(old + 1));
    return old;
  }
  T operator--(int) && {
    const T old = Read();
    Write(static_cast<T>(old - 1));
    return old;
  }
  Shared<T> operator&() && { return Shared<T>(region_, index_); }

 private:
  T Read() const {
    CheckBounds(region_, index_);
    CheckRead(*region_, index_);
    return reinterpret_cast<const T*>(region_->data)[index_];
  }
  T Write(T value) const {
    CheckBounds(region_, index_);
    CheckWrite(*region_, index_);
    return reinterpret_cast<T*>(region_->data)[index_] = value;
  }

  Region* region_;
  int64_t index_;
};

}  // namespace emulation

// Stands for T* into shared memory.
template <typename T>
class Shared {
  using Value = std::remove_const_t<T>;

 public:
  Shared() = default;
  Shared(std::nullptr_t) {}
  Shared(emulation::Region* region, int64_t index) : region_(region), index_(index) {}
  operator Shared<const T>() const
    requires(!std::is_const_v<T>)
  {
    return {region_, index_};
  }

  auto operator[](int64_t i) const {
    if constexpr (std::is_const_v<T>) {
      emulation::CheckBounds(region_, index_ + i);
      emulation::CheckRead(*region_, index_ + i);
      return reinterpret_cast<const Value*>(region_->data)[index_ + i];
    } else {
      return emulation::SharedElement<T>(region_, index_ + i);
    }
  }
  auto operator*() const { return (*this)[0]; }

  Shared operator+(int64_t n) const { return {region_, index_ + n}; }
  Shared operator-(int64_t n) const { return {region_, index_ - n}; }
  Shared& operator+=(int64_t n) { return *this = *this + n; }
  Shared& operator-=(int64_t n) { return *this = *this - n; }
  Shared& operator++() { return *this += 1; }
  int64_t operator-(const Shared& other) const { return index_ - other.index_; }
  bool operator==(const Shared& other) const = default;
  explicit operator bool() const { return region_ != nullptr; }

  // `count` elements at once, as one access of that width: aligned to it, and checked as a whole.
  template <bool kWrite>
  Value* Wide(int64_t count) const {
    if (region_ == nullptr || index_ < 0 || index_ + count > region_->count) [[unlikely]]
      emulation::FailBounds(region_, index_, count);
    Value* const data = reinterpret_cast<Value*>(region_->data) + index_;
    if (reinterpret_cast<uintptr_t>(data) % (count * sizeof(T)) != 0) [[unlikely]]
      emulation::Fail("misaligned vector access to shared memory at element " + std::to_string(index_));
    for (int64_t i = 0; i < count; ++i) {
      if constexpr (kWrite) {
        emulation::CheckWrite(*region_, index_ + i);
      } else {
        emulation::CheckRead(*region_, index_ + i);
      }
    }
    return data;
  }

  // The element for an atomic operation.
  T* Atomic() const {
    emulation::CheckBounds(region_, index_);
    emulation::CheckAtomic(*region_, index_);
    return reinterpret_cast<T*>(region_->data) + index_;
  }

 private:
  emulation::Region* region_ = nullptr;
  int64_t index_ = 0;
};

// The dynamic shared memory of the block, handed out in order.  All threads take the same.
class SharedArena {
 public:
  template <typename T>
  Shared<T> Take(int64_t count) {
    return {TakeRegion(count, sizeof(T)), 0};
  }

 private:
  emulation::Region* TakeRegion(int64_t count, size_t element_size) {
    emulation::Region* const region = emulation::TakeShared(number_++, offset_, count, element_size);
    offset_ += static_cast<int64_t>((static_cast<size_t>(count) * element_size + 15) / 16 * 16);
    return region;
  }

  int number_ = 0;
  int64_t offset_ = 0;
};

inline float4 Load4(Shared<const float> p) {
  float4 value;
  memcpy(&value, p.Wide<false>(4), sizeof(value));
  return value;
}
inline void Store4(Shared<float> p, float4 value) { memcpy(p.Wide<true>(4), &value, sizeof(value)); }

inline void CheckAligned(const void* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) [[unlikely]]
    emulation::Fail("misaligned vector access to global memory");
}
inline float4 Load4(const float* p) {
  CheckAligned(p, sizeof(float4));
  return {p[0], p[1], p[2], p[3]};
}
inline void Store4(float* p, float4 value) {
  CheckAligned(p, sizeof(float4));
  memcpy(p, &value, sizeof(value));
}

}  // namespace jax_tt
