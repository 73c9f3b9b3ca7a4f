// Type traits, numeric limits and vectors of the Metal Shading Language.
#pragma once
#include "emu_types.h"
namespace metal {
using std::bool_constant;
using std::conditional;
using std::conditional_t;
using std::enable_if;
using std::enable_if_t;
using std::false_type;
using std::integral_constant;
using std::is_convertible_v;
using std::is_floating_point_v;
using std::is_integral;
using std::is_integral_v;
using std::is_pointer_v;
using std::is_same;
using std::is_same_v;
using std::is_signed;
using std::is_signed_v;
using std::is_unsigned_v;
using std::make_unsigned_t;
using std::remove_cv_t;
using std::true_type;
template <class T>
using remove_addrspace_t = T;
using std::conjunction;
using std::decay_t;
using std::declval;
using std::disjunction;
using std::is_arithmetic_v;
using std::is_const;
using std::is_pointer;
using std::remove_reference_t;
template <class T>
struct numeric_limits : std::numeric_limits<T> {};
template <>
struct numeric_limits<half> {
  static constexpr half max() {
    return (half)65504.f;
  }
  static constexpr half lowest() {
    return (half)-65504.f;
  }
  static constexpr half min() {
    return (half)6.103515625e-05f;
  }
  static constexpr half infinity() {
    return (half)__builtin_inff();
  }
  static constexpr half quiet_NaN() {
    return (half)__builtin_nanf("");
  }
};
template <>
struct numeric_limits<bfloat> {
  static constexpr bfloat max() {
    return bfloat(__builtin_bit_cast(float, 0x7f7f0000u));
  }
  static constexpr bfloat lowest() {
    return bfloat(__builtin_bit_cast(float, 0xff7f0000u));
  }
  static constexpr bfloat min() {
    return bfloat(__builtin_bit_cast(float, 0x00800000u));
  }
  static constexpr bfloat infinity() {
    return bfloat(__builtin_inff());
  }
  static constexpr bfloat quiet_NaN() {
    return bfloat(__builtin_nanf(""));
  }
};

// ---- vectors
template <class T, int N>
struct vec;
namespace emu_d {
template <class T>
struct is_vec : std::false_type {};
template <class T, int N>
struct is_vec<vec<T, N>> : std::true_type {};
template <class T>
constexpr bool is_scal =
    std::is_arithmetic_v<T> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
template <class T, int N, int... I>
struct swz {  // a view of some components
  T d[N];
  operator vec<T, sizeof...(I)>() const {
    return vec<T, sizeof...(I)>(d[I]...);
  }
  swz& operator=(const vec<T, sizeof...(I)>& v) {
    int k = 0;
    ((d[I] = v[k++]), ...);
    return *this;
  }
  swz& operator=(const swz& o) {
    return *this = (vec<T, sizeof...(I)>)o;
  }
  T operator[](int i) const {
    const int m[] = {I...};
    return d[m[i]];
  }
};
template <class T, int N>
struct st;
template <class T>
struct alignas(sizeof(T) * 2) st<T, 2> {
  st() = default;
  st(const st&) = default;
  st& operator=(const st& o) {
    __builtin_memcpy(d, o.d, sizeof d);
    return *this;
  }
  union {
    T d[2];
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
    swz<T, 2, 0, 1> xy;
    swz<T, 2, 1, 0> yx;
    swz<T, 2, 0, 0> xx;
    swz<T, 2, 1, 1> yy;
  };
};
template <class T>
struct alignas(sizeof(T) * 4) st<T, 3> {
  st() = default;
  st(const st&) = default;
  st& operator=(const st& o) {
    __builtin_memcpy(d, o.d, sizeof d);
    return *this;
  }
  union {
    T d[3];
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
    swz<T, 3, 0, 1> xy;
    swz<T, 3, 1, 2> yz;
    swz<T, 3, 0, 2> xz;
    swz<T, 3, 0, 1, 2> xyz;
  };
};
template <class T>
struct alignas(sizeof(T) * 4) st<T, 4> {
  st() = default;
  st(const st&) = default;
  st& operator=(const st& o) {
    __builtin_memcpy(d, o.d, sizeof d);
    return *this;
  }
  union {
    T d[4];
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
    swz<T, 4, 0, 1> xy;
    swz<T, 4, 2, 3> zw;
    swz<T, 4, 0, 1> lo;
    swz<T, 4, 2, 3> hi;
    swz<T, 4, 0, 2> even;
    swz<T, 4, 1, 3> odd;
    swz<T, 4, 1, 2> yz;
    swz<T, 4, 0, 2> xz;
    swz<T, 4, 0, 1, 2> xyz;
    swz<T, 4, 1, 2, 3> yzw;
    swz<T, 4, 3, 2, 1, 0> wzyx;
  };
};
template <class T>
struct alignas(sizeof(T) * 8) st<T, 8> {
  T d[8];
};
}  // namespace emu_d
template <class T, int N>
struct vec : emu_d::st<T, N> {
  using emu_d::st<T, N>::d;
  vec() = default;
  template <class S, class = std::enable_if_t<emu_d::is_scal<S>>>
  constexpr vec(S s) {
    for (int i = 0; i < N; i++) d[i] = (T)s;
  }
  template <class U>
  explicit constexpr vec(const vec<U, N>& o) {
    for (int i = 0; i < N; i++) d[i] = (T)o.d[i];
  }
  template <class A, class B, class... R>
  constexpr vec(A a, B b, R... r) {
    int k = 0;
    put(k, a);
    put(k, b);
    (put(k, r), ...);
  }
  template <class A>
  constexpr void put(int& k, const A& a) {
    if constexpr (emu_d::is_scal<A>)
      d[k++] = (T)a;
    else
      put_v(k, a);
  }
  template <class U, int M>
  constexpr void put_v(int& k, const vec<U, M>& a) {
    for (int i = 0; i < M; i++) d[k++] = (T)a.d[i];
  }
  template <class U, int M, int... I>
  constexpr void put_v(int& k, const emu_d::swz<U, M, I...>& a) {
    ((d[k++] = (T)a.d[I]), ...);
  }
  T& operator[](int i) {
    return d[i];
  }
  const T& operator[](int i) const {
    return d[i];
  }
#define EMU_A(op)                                                 \
  vec& operator op##=(const vec & o) {                            \
    for (int i = 0; i < N; i++) d[i] = (T)(d[i] op o.d[i]);       \
    return *this;                                                 \
  }                                                               \
  template <class S, class = std::enable_if_t<emu_d::is_scal<S>>> \
  vec& operator op##=(S s) {                                      \
    for (int i = 0; i < N; i++) d[i] = (T)(d[i] op(T) s);         \
    return *this;                                                 \
  }
  EMU_A(+)
  EMU_A(-) EMU_A(*) EMU_A(/) EMU_A(&) EMU_A(|) EMU_A(^) EMU_A(<<) EMU_A(>>) EMU_A(%)
#undef EMU_A
      vec
      operator-() const {
    vec r;
    for (int i = 0; i < N; i++) r.d[i] = -d[i];
    return r;
  }
  vec operator~() const {
    vec r;
    for (int i = 0; i < N; i++) r.d[i] = ~d[i];
    return r;
  }
};
#define EMU_V(op)                                                                 \
  template <class T, int N>                                                       \
  inline vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) {          \
    vec<T, N> r;                                                                  \
    for (int i = 0; i < N; i++) r.d[i] = (T)(a.d[i] op b.d[i]);                   \
    return r;                                                                     \
  }                                                                               \
  template <class T, int N, class S, class = std::enable_if_t<emu_d::is_scal<S>>> \
  inline vec<T, N> operator op(const vec<T, N>& a, S b) {                         \
    vec<T, N> r;                                                                  \
    for (int i = 0; i < N; i++) r.d[i] = (T)(a.d[i] op(T) b);                     \
    return r;                                                                     \
  }                                                                               \
  template <class T, int N, class S, class = std::enable_if_t<emu_d::is_scal<S>>> \
  inline vec<T, N> operator op(S a, const vec<T, N>& b) {                         \
    vec<T, N> r;                                                                  \
    for (int i = 0; i < N; i++) r.d[i] = (T)((T)a op b.d[i]);                     \
    return r;                                                                     \
  }
EMU_V(+)
EMU_V(-) EMU_V(*) EMU_V(/) EMU_V(&) EMU_V(|) EMU_V(^) EMU_V(<<) EMU_V(>>) EMU_V(%)
#undef EMU_V
#define EMU_V(op)                                                                 \
  template <class T, int N>                                                       \
  inline vec<bool, N> operator op(const vec<T, N>& a, const vec<T, N>& b) {       \
    vec<bool, N> r;                                                               \
    for (int i = 0; i < N; i++) r.d[i] = a.d[i] op b.d[i];                        \
    return r;                                                                     \
  }                                                                               \
  template <class T, int N, class S, class = std::enable_if_t<emu_d::is_scal<S>>> \
  inline vec<bool, N> operator op(const vec<T, N>& a, S b) {                      \
    vec<bool, N> r;                                                               \
    for (int i = 0; i < N; i++) r.d[i] = a.d[i] op(T) b;                          \
    return r;                                                                     \
  }
    EMU_V(==) EMU_V(!=) EMU_V(<) EMU_V(>) EMU_V(<=) EMU_V(>=) EMU_V(&&) EMU_V(||)
#undef EMU_V
        template <int N>
        inline bool any(const vec<bool, N>& v) {
  for (int i = 0; i < N; i++)
    if (v.d[i])
      return true;
  return false;
}
template <int N>
inline bool all(const vec<bool, N>& v) {
  for (int i = 0; i < N; i++)
    if (!v.d[i])
      return false;
  return true;
}
template <class T, int N>
inline T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T s = (T)(a.d[0] * b.d[0]);
  for (int i = 1; i < N; i++) s = (T)(s + a.d[i] * b.d[i]);
  return s;
}
template <class T>
using vec2 = vec<T, 2>;
}  // namespace metal
#define EMU_T(t)                 \
  using t##2 = metal::vec<t, 2>; \
  using t##3 = metal::vec<t, 3>; \
  using t##4 = metal::vec<t, 4>;
EMU_T(float)
EMU_T(half) EMU_T(bfloat) EMU_T(int) EMU_T(uint) EMU_T(short) EMU_T(ushort) EMU_T(char) EMU_T(uchar)
    EMU_T(long) EMU_T(ulong) EMU_T(bool)
#undef EMU_T
        struct packed_float3 {
  float x, y, z;
};
struct packed_half4 {
  half x, y, z, w;
};

template <class To, class From>
inline To as_type(const From& f) {
  static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
  To t;
  __builtin_memcpy(&t, &f, sizeof t);
  return t;
}
