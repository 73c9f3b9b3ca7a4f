// Mathematical and integer functions. half and bfloat round once, as the reference semantics say.
#pragma once
#include "emu_vec.h"
namespace metal {
// ---- math; half and bfloat results round once, as the reference semantics of the op
template <class T>
struct emu_wide {
  using type = T;
};
#define EMU_F1(name, impl)                                            \
  inline float name(float x) {                                        \
    return impl(x);                                                   \
  }                                                                   \
  inline half name(half x) {                                          \
    return (half)impl((float)x);                                      \
  }                                                                   \
  inline float name(bfloat x) {                                       \
    return impl((float)x);                                            \
  }                                                                   \
  template <class I, class = std::enable_if_t<std::is_integral_v<I>>> \
  inline float name(I x) {                                            \
    return impl((float)x);                                            \
  }                                                                   \
  template <class T, int N>                                           \
  inline vec<T, N> name(const vec<T, N>& v) {                         \
    vec<T, N> r;                                                      \
    for (int i = 0; i < N; i++) r.d[i] = (T)name(v.d[i]);             \
    return r;                                                         \
  }
inline float emu_rsqrt(float x) {
  return 1.0f / __builtin_sqrtf(x);
}
inline float emu_fract(float x) {
  float r = x - __builtin_floorf(x);
  return r;
}
inline float emu_exp10(float x) {
  return __builtin_powf(10.0f, x);
}
inline float emu_sign(float x) {
  return x > 0 ? 1.0f : x < 0 ? -1.0f : x;
}
inline float emu_sat(float x) {
  return x < 0 ? 0.0f : x > 1 ? 1.0f : x;
}
#define EMU_ALLF1                                                                                 \
  EMU_F1(exp, __builtin_expf)                                                                     \
  EMU_F1(exp2, __builtin_exp2f) EMU_F1(exp10, emu_exp10) EMU_F1(log, __builtin_logf)              \
      EMU_F1(log2, __builtin_log2f) EMU_F1(log10, __builtin_log10f) EMU_F1(sqrt, __builtin_sqrtf) \
          EMU_F1(rsqrt, emu_rsqrt) EMU_F1(sin, __builtin_sinf) EMU_F1(cos, __builtin_cosf)        \
              EMU_F1(tan, __builtin_tanf) EMU_F1(tanh, __builtin_tanhf)                           \
                  EMU_F1(sinh, __builtin_sinhf) EMU_F1(cosh, __builtin_coshf)                     \
                      EMU_F1(asin, __builtin_asinf) EMU_F1(acos, __builtin_acosf)                 \
                          EMU_F1(atan, __builtin_atanf) EMU_F1(floor, __builtin_floorf)           \
                              EMU_F1(ceil, __builtin_ceilf) EMU_F1(round, __builtin_roundf)       \
                                  EMU_F1(rint, __builtin_rintf) EMU_F1(trunc, __builtin_truncf)   \
                                      EMU_F1(fabs, __builtin_fabsf) EMU_F1(fract, emu_fract)      \
                                          EMU_F1(sign, emu_sign) EMU_F1(saturate, emu_sat)
EMU_ALLF1
inline float pow(float a, float b) {
  return __builtin_powf(a, b);
}
inline half pow(half a, half b) {
  return (half)__builtin_powf(a, b);
}
inline float powr(float a, float b) {
  return __builtin_powf(a, b);
}
inline float fmod(float a, float b) {
  return __builtin_fmodf(a, b);
}
inline float atan2(float a, float b) {
  return __builtin_atan2f(a, b);
}
inline float ldexp(float a, int b) {
  return __builtin_ldexpf(a, b);
}
inline float fma(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
inline half fma(half a, half b, half c) {
  return (half)__builtin_fma((double)a, (double)b, (double)c);
}
inline bfloat fma(bfloat a, bfloat b, bfloat c) {
  return bfloat(__builtin_fmaf(a, b, c));
}
template <class T, int N>
inline vec<T, N> fma(const vec<T, N>& a, const vec<T, N>& b, const vec<T, N>& c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r.d[i] = fma(a.d[i], b.d[i], c.d[i]);
  return r;
}
template <class T>
inline T mad(T a, T b, T c) {
  return (T)(a * b + c);
}
// min/max/abs/clamp: same type on both sides, as in MSL
#define EMU_MM(T)                   \
  inline T min(T a, T b) {          \
    return b < a ? b : a;           \
  }                                 \
  inline T max(T a, T b) {          \
    return a < b ? b : a;           \
  }                                 \
  inline T clamp(T x, T lo, T hi) { \
    return min(max(x, lo), hi);     \
  }
EMU_MM(int)
EMU_MM(uint) EMU_MM(short) EMU_MM(ushort) EMU_MM(char) EMU_MM(signed char) EMU_MM(uchar)
    EMU_MM(long) EMU_MM(ulong) EMU_MM(long long) EMU_MM(unsigned long long) EMU_MM(bool)
#undef EMU_MM
#define EMU_MM(T)                                   \
  inline T fmin(T a, T b) {                         \
    return a != a ? b : b != b ? a : b < a ? b : a; \
  }                                                 \
  inline T fmax(T a, T b) {                         \
    return a != a ? b : b != b ? a : a < b ? b : a; \
  }                                                 \
  inline T min(T a, T b) {                          \
    return fmin(a, b);                              \
  }                                                 \
  inline T max(T a, T b) {                          \
    return fmax(a, b);                              \
  }                                                 \
  inline T clamp(T x, T lo, T hi) {                 \
    return fmin(fmax(x, lo), hi);                   \
  }
        EMU_MM(float) EMU_MM(half) EMU_MM(bfloat)
#undef EMU_MM
            template <class T, int N>
            inline vec<T, N> min(const vec<T, N>& a, const vec<T, N>& b) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r.d[i] = min(a.d[i], b.d[i]);
  return r;
}
template <class T, int N>
inline vec<T, N> max(const vec<T, N>& a, const vec<T, N>& b) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r.d[i] = max(a.d[i], b.d[i]);
  return r;
}
template <class T>
inline T max3(T a, T b, T c) {
  return max(a, max(b, c));
}
template <class T>
inline T min3(T a, T b, T c) {
  return min(a, min(b, c));
}
inline float abs(float x) {
  return __builtin_fabsf(x);
}
inline half abs(half x) {
  return (half)__builtin_fabsf(x);
}
inline float abs(bfloat x) {
  return __builtin_fabsf(x);
}
inline int abs(int x) {
  return x < 0 ? -x : x;
}
inline short abs(short x) {
  return x < 0 ? -x : x;
}
inline long abs(long x) {
  return x < 0 ? -x : x;
}
template <class T, int N>
inline vec<T, N> abs(const vec<T, N>& v) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r.d[i] = (T)abs(v.d[i]);
  return r;
}
inline bool isnan(float x) {
  return x != x;
}
inline bool isinf(float x) {
  return __builtin_isinf(x);
}
inline bool isfinite(float x) {
  return __builtin_isfinite(x);
}
inline bool signbit(float x) {
  return __builtin_signbit(x);
}
inline float copysign(float a, float b) {
  return __builtin_copysignf(a, b);
}
template <class T>
inline T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T, int N>
inline vec<T, N> select(const vec<T, N>& a, const vec<T, N>& b, const vec<bool, N>& c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r.d[i] = c.d[i] ? b.d[i] : a.d[i];
  return r;
}
template <class T>
inline T mix(T a, T b, T t) {
  return (T)(a + (b - a) * t);
}
template <class T>
inline T step(T e, T x) {
  return x < e ? (T)0 : (T)1;
}
template <class T>
inline T popcount(T x) {
  return (T)__builtin_popcountll((unsigned long long)std::make_unsigned_t<T>(x));
}
template <class T>
inline T clz(T x) {
  if (!x)
    return (T)(8 * sizeof(T));
  return (T)(__builtin_clzll((unsigned long long)std::make_unsigned_t<T>(x)) -
             (64 - 8 * sizeof(T)));
}
template <class T>
inline T ctz(T x) {
  return x ? (T)__builtin_ctzll((unsigned long long)x) : (T)(8 * sizeof(T));
}
template <class T>
inline T extract_bits(T x, uint off, uint n) {
  if (!n)
    return 0;
  T s = (T)(x << (8 * sizeof(T) - off - n));
  return (T)(s >> (8 * sizeof(T) - n));
}
template <class T>
inline T insert_bits(T b, T i, uint off, uint n) {
  T m = n >= 8 * sizeof(T) ? (T) ~(T)0 : (T)((((T)1 << n) - 1) << off);
  return (T)((b & ~m) | ((i << off) & m));
}
template <class T>
inline T rotate(T v, T s) {
  using U = std::make_unsigned_t<T>;
  constexpr unsigned b = 8 * sizeof(T);
  unsigned k = (unsigned)s % b;
  return k ? (T)(((U)v << k) | ((U)v >> (b - k))) : v;
}
template <class T>
inline T mulhi(T a, T b) {
  if constexpr (sizeof(T) == 4)
    return (T)(((std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>)a * b) >> 32);
  else
    return (T)(((__int128)a * b) >> (8 * sizeof(T)));
}
inline uint reverse_bits(uint x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
  return __builtin_bswap32(x);
}
inline float divide(float a, float b) {
  return a / b;
}
namespace fast {
EMU_ALLF1 inline float fmin(float a, float b) {
  return metal::fmin(a, b);
}
inline float fmax(float a, float b) {
  return metal::fmax(a, b);
}
inline float max(float a, float b) {
  return metal::max(a, b);
}
inline float min(float a, float b) {
  return metal::min(a, b);
}
inline float pow(float a, float b) {
  return __builtin_powf(a, b);
}
inline float divide(float a, float b) {
  return a / b;
}
inline float clamp(float a, float b, float c) {
  return metal::clamp(a, b, c);
}
}  // namespace fast
namespace precise {
EMU_ALLF1 inline float fmin(float a, float b) {
  return metal::fmin(a, b);
}
inline float fmax(float a, float b) {
  return metal::fmax(a, b);
}
inline float pow(float a, float b) {
  return __builtin_powf(a, b);
}
inline float divide(float a, float b) {
  return a / b;
}
}  // namespace precise
}  // namespace metal
