// Keywords of the Metal Shading Language as C++, and its two 16-bit floating types.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cstddef>
#include <climits>
#include <cfloat>
#include <limits>
#include <type_traits>
#include <utility>
#include <sys/types.h>
#include "emu_rt.h"

// ---- keywords
#define device
#define constant
#define thread
#define threadgroup /* storage declarations are rewritten before compilation */
#define threadgroup_imageblock
#define kernel
#define METAL_FUNC inline
#define __METAL_VERSION__ 310
#define __METAL__ 1
#define __METAL_EMU__ 1
#undef INFINITY
#define INFINITY (__builtin_inff())
#undef NAN
#define NAN (__builtin_nanf(""))

typedef unsigned char uchar;
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long ulong;
typedef _Float16 half;

// ---- bfloat: converts implicitly only to wider floating types, as in the MSL specification
struct bfloat {
  uint16_t bits_;
  bfloat() = default;
  constexpr bfloat(const bfloat&) = default;
  bfloat& operator=(const bfloat&) = default;
  static constexpr uint16_t rne(float f) {
    uint32_t u = __builtin_bit_cast(uint32_t, f);
    if ((u & 0x7fffffffu) > 0x7f800000u)
      return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  }
  template <class A, class = std::enable_if_t<std::is_arithmetic_v<A> || std::is_same_v<A, half>>>
  explicit constexpr bfloat(A a) : bits_(rne((float)a)) {}
  constexpr float f() const {
    return __builtin_bit_cast(float, (uint32_t)bits_ << 16);
  }
  constexpr operator float() const {
    return f();
  }
  template <class A, class = std::enable_if_t<std::is_integral_v<A>>>
  explicit constexpr operator A() const {
    return (A)f();
  }
  explicit constexpr operator half() const {
    return (half)f();
  }
#define EMU_CA(op)                                                    \
  bfloat& operator op##=(bfloat o) {                                  \
    *this = bfloat(f() op o.f());                                     \
    return *this;                                                     \
  }                                                                   \
  template <class A, class = std::enable_if_t<std::is_integral_v<A>>> \
  bfloat& operator op##=(A o) {                                       \
    *this = bfloat(f() op bfloat(o).f());                             \
    return *this;                                                     \
  }
  EMU_CA(+)
  EMU_CA(-) EMU_CA(*) EMU_CA(/)
#undef EMU_CA
      constexpr bfloat
      operator-() const {
    bfloat r(*this);
    r.bits_ ^= 0x8000;
    return r;
  }
};
#define EMU_B(op)                                                     \
  inline constexpr bfloat operator op(bfloat a, bfloat b) {           \
    return bfloat(a.f() op b.f());                                    \
  }                                                                   \
  inline constexpr float operator op(bfloat a, float b) {             \
    return a.f() op b;                                                \
  }                                                                   \
  inline constexpr float operator op(float a, bfloat b) {             \
    return a op b.f();                                                \
  }                                                                   \
  template <class I, class = std::enable_if_t<std::is_integral_v<I>>> \
  inline constexpr bfloat operator op(bfloat a, I b) {                \
    return bfloat(a.f() op bfloat(b).f());                            \
  }                                                                   \
  template <class I, class = std::enable_if_t<std::is_integral_v<I>>> \
  inline constexpr bfloat operator op(I a, bfloat b) {                \
    return bfloat(bfloat(a).f() op b.f());                            \
  }
EMU_B(+)
EMU_B(-) EMU_B(*) EMU_B(/)
#undef EMU_B
#define EMU_C(op)                                                     \
  inline constexpr bool operator op(bfloat a, bfloat b) {             \
    return a.f() op b.f();                                            \
  }                                                                   \
  inline constexpr bool operator op(bfloat a, float b) {              \
    return a.f() op b;                                                \
  }                                                                   \
  inline constexpr bool operator op(float a, bfloat b) {              \
    return a op b.f();                                                \
  }                                                                   \
  template <class I, class = std::enable_if_t<std::is_integral_v<I>>> \
  inline constexpr bool operator op(bfloat a, I b) {                  \
    return a.f() op(float) b;                                         \
  }                                                                   \
  template <class I, class = std::enable_if_t<std::is_integral_v<I>>> \
  inline constexpr bool operator op(I a, bfloat b) {                  \
    return (float)a op b.f();                                         \
  }
    EMU_C(==) EMU_C(!=) EMU_C(<) EMU_C(>) EMU_C(<=) EMU_C(>=)
#undef EMU_C
        static_assert(std::is_trivially_copyable_v<bfloat> && sizeof(bfloat) == 2);
