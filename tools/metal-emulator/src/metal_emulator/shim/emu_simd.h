// Barriers and the operations that the lanes of a simdgroup perform together.
#pragma once
#include "emu_math.h"
namespace metal {
// ---- barriers
enum class mem_flags : int {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16
};
inline constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return (mem_flags)((int)a | (int)b);
}
inline void threadgroup_barrier(mem_flags f, int line = __builtin_LINE()) {
  emu::tg_barrier((int)f, line);
}
inline void simdgroup_barrier(mem_flags f, int line = __builtin_LINE()) {
  emu::sg_barrier((int)f, line);
}

// ---- simdgroup collectives
namespace emu_d {
template <class T>
struct Io {
  T in;
  T out;
  int k;
  int bad;
};
template <class T>
inline Io<T>& io(emu::Simd& s, int i) {
  return *(Io<T>*)s.lanes[i].arg;
}
struct OpAdd {
  template <class T>
  static T f(T a, T b) {
    return (T)(a + b);
  }
  template <class T>
  static T id() {
    return (T)0;
  }
};
struct OpMul {
  template <class T>
  static T f(T a, T b) {
    return (T)(a * b);
  }
  template <class T>
  static T id() {
    return (T)1;
  }
};
struct OpMin {
  template <class T>
  static T f(T a, T b) {
    return metal::min(a, b);
  }
};
struct OpMax {
  template <class T>
  static T f(T a, T b) {
    return metal::max(a, b);
  }
};
struct OpAnd {
  template <class T>
  static T f(T a, T b) {
    return a & b;
  }
};
struct OpOr {
  template <class T>
  static T f(T a, T b) {
    return a | b;
  }
};
struct OpXor {
  template <class T>
  static T f(T a, T b) {
    return a ^ b;
  }
};
template <class T, class Op, int W>
void reduce(emu::Simd& s, uint32_t m) {
  for (int base = 0; base < s.n; base += W) {
    T v[W];
    bool have[W];
    int w = 0;
    for (int i = 0; i < W; i++) {
      have[i] = base + i < s.n && (m >> (base + i) & 1);
      if (have[i]) {
        v[i] = io<T>(s, base + i).in;
        w++;
      }
    }
    if (!w)
      continue;
    if (emu::sum_order == 2) {
      T a{};
      bool first = true;
      for (int i = 0; i < W; i++)
        if (have[i]) {
          a = first ? v[i] : Op::template f<T>(a, v[i]);
          first = false;
        }
      for (int i = 0; i < W; i++)
        if (have[i])
          io<T>(s, base + i).out = a;
      continue;
    }
    for (int q = 1; q < W; q <<= 1) {
      int d = emu::sum_order == 1 ? q : W / (2 * q);
      T nv[W];
      bool nh[W];
      for (int i = 0; i < W; i++) {
        int j = i ^ d;
        int lo = i < j ? i : j, hi = i < j ? j : i;
        nh[i] = have[i] || have[j];
        nv[i] = have[lo] && have[hi] ? Op::template f<T>(v[lo], v[hi]) : have[lo] ? v[lo] : v[hi];
      }
      for (int i = 0; i < W; i++) {
        v[i] = nv[i];
        have[i] = nh[i];
      }
    }
    for (int i = 0; i < W; i++)
      if (base + i < s.n && (m >> (base + i) & 1))
        io<T>(s, base + i).out = v[i];
  }
}
template <class T, class Op, bool Incl>
void prefix(emu::Simd& s, uint32_t m) {
  T a = Op::template id<T>();
  for (int i = 0; i < s.n; i++)
    if (m >> i & 1) {
      T x = io<T>(s, i).in;
      if (!Incl)
        io<T>(s, i).out = a;
      a = Op::template f<T>(a, x);
      if (Incl)
        io<T>(s, i).out = a;
    }
}
// mode: 0 index (within W lanes), 1 up, 2 down, 3 xor, 4 rotate up, 5 rotate down
template <class T, int Mode, int W>
void shuffle(emu::Simd& s, uint32_t m) {
  for (int i = 0; i < s.n; i++)
    if (m >> i & 1) {
      auto& x = io<T>(s, i);
      int b = i / W * W, l = i - b, j;
      switch (Mode) {
        case 0:
          j = x.k;
          break;
        case 1:
          j = l - x.k;
          if (j < 0) {
            x.out = x.in;
            continue;
          }
          break;
        case 2:
          j = l + x.k;
          if (j >= W) {
            x.out = x.in;
            continue;
          }
          break;
        case 3:
          j = l ^ x.k;
          break;
        case 4:
          j = (l - x.k) & (W - 1);
          break;
        default:
          j = (l + x.k) & (W - 1);
      }
      if (j < 0 || j >= W || b + j >= s.n || !(m >> (b + j) & 1)) {
        x.bad = 1;
        std::memset(&x.out, 0xff, sizeof(T));
        continue;
      }
      x.out = io<T>(s, b + j).in;
    }
}
template <class T>
void bcast_first(emu::Simd& s, uint32_t m) {
  int f = __builtin_ctz(m);
  T v = io<T>(s, f).in;
  for (int i = 0; i < s.n; i++)
    if (m >> i & 1)
      io<T>(s, i).out = v;
}
inline void ballot(emu::Simd& s, uint32_t m) {
  uint64_t r = 0;
  for (int i = 0; i < s.n; i++)
    if ((m >> i & 1) && io<uint64_t>(s, i).in)
      r |= 1ull << i;
  for (int i = 0; i < s.n; i++)
    if (m >> i & 1) {
      io<uint64_t>(s, i).out = r;
      io<uint64_t>(s, i).k = (int)m;
    }
}
template <class T>
inline T run(emu::CollFn fn, T v, int k, const char* op, int line) {
  Io<T> x{v, v, k, 0};
  emu::collective(fn, &x, op, line);
  if (x.bad && emu::strict)
    emu::fail(
        "%s at line %d reads a lane that is outside the simdgroup or not active (argument %d)", op,
        line, k);
  return x.out;
}
template <class T>
struct up {
  using t = T;
};
template <>
struct up<bfloat> {
  using t = float;
};
}  // namespace emu_d
#define EMU_R(name, Op, W)                                                      \
  template <class T>                                                            \
  inline typename emu_d::up<T>::t name(T v, int line = __builtin_LINE()) {      \
    using U = typename emu_d::up<T>::t;                                         \
    return emu_d::run<U>(emu_d::reduce<U, emu_d::Op, W>, (U)v, 0, #name, line); \
  }
EMU_R(simd_sum, OpAdd, 32)
EMU_R(simd_product, OpMul, 32) EMU_R(simd_min, OpMin, 32) EMU_R(simd_max, OpMax, 32)
    EMU_R(simd_and, OpAnd, 32) EMU_R(simd_or, OpOr, 32) EMU_R(simd_xor, OpXor, 32)
        EMU_R(quad_sum, OpAdd, 4) EMU_R(quad_product, OpMul, 4) EMU_R(quad_min, OpMin, 4)
            EMU_R(quad_max, OpMax, 4) EMU_R(quad_and, OpAnd, 4) EMU_R(quad_or, OpOr, 4)
                EMU_R(quad_xor, OpXor, 4)
#define EMU_S(name, Mode, W)                                                  \
  template <class T>                                                          \
  inline T name(T v, ushort k, int line = __builtin_LINE()) {                 \
    return emu_d::run<T>(emu_d::shuffle<T, Mode, W>, v, (int)k, #name, line); \
  }
                    EMU_S(simd_shuffle, 0, 32) EMU_S(simd_broadcast, 0, 32)
                        EMU_S(simd_shuffle_up, 1, 32) EMU_S(simd_shuffle_down, 2, 32)
                            EMU_S(simd_shuffle_xor, 3, 32) EMU_S(simd_shuffle_rotate_up, 4, 32)
                                EMU_S(simd_shuffle_rotate_down, 5, 32) EMU_S(quad_shuffle, 0, 4)
                                    EMU_S(quad_broadcast, 0, 4) EMU_S(quad_shuffle_up, 1, 4)
                                        EMU_S(quad_shuffle_down, 2, 4) EMU_S(quad_shuffle_xor, 3, 4)
                                            EMU_S(quad_shuffle_rotate_up, 4, 4)
                                                EMU_S(quad_shuffle_rotate_down, 5,
                                                      4) template <class T, int Up>
                                                inline void emu_fill(emu::Simd& s, uint32_t m);
template <class T>
struct emu_fill_arg {
  T in, fill, out;
  int k, mod;
};
template <class T, int Up>
inline void emu_fill(emu::Simd& s, uint32_t m) {
  auto A = [&](int i) -> emu_fill_arg<T>& { return *(emu_fill_arg<T>*)s.lanes[i].arg; };
  for (int i = 0; i < s.n; i++)
    if (m >> i & 1) {
      auto& x = A(i);
      int w = x.mod, b = i / w * w, l = i - b, j = Up ? l - x.k : l + x.k;
      if (j < 0)
        x.out = A(b + w + j).fill;
      else if (j >= w)
        x.out = A(b + j - w).fill;
      else
        x.out = A(b + j).in;
    }
}
template <class T>
inline T simd_shuffle_and_fill_up(T v, T f, ushort k, ushort mod = 32,
                                  int line = __builtin_LINE()) {
  emu_fill_arg<T> x{v, f, v, k, mod};
  emu::collective(emu_fill<T, 1>, &x, "simd_shuffle_and_fill_up", line);
  return x.out;
}
template <class T>
inline T simd_shuffle_and_fill_down(T v, T f, ushort k, ushort mod = 32,
                                    int line = __builtin_LINE()) {
  emu_fill_arg<T> x{v, f, v, k, mod};
  emu::collective(emu_fill<T, 0>, &x, "simd_shuffle_and_fill_down", line);
  return x.out;
}
template <class T>
inline T simd_broadcast_first(T v, int line = __builtin_LINE()) {
  return emu_d::run<T>(emu_d::bcast_first<T>, v, 0, "simd_broadcast_first", line);
}
template <class T>
inline T simd_prefix_inclusive_sum(T v, int line = __builtin_LINE()) {
  return emu_d::run<T>(emu_d::prefix<T, emu_d::OpAdd, true>, v, 0, "simd_prefix_inclusive_sum",
                       line);
}
template <class T>
inline T simd_prefix_exclusive_sum(T v, int line = __builtin_LINE()) {
  return emu_d::run<T>(emu_d::prefix<T, emu_d::OpAdd, false>, v, 0, "simd_prefix_exclusive_sum",
                       line);
}
template <class T>
inline T simd_prefix_inclusive_product(T v, int line = __builtin_LINE()) {
  return emu_d::run<T>(emu_d::prefix<T, emu_d::OpMul, true>, v, 0, "simd_prefix_inclusive_product",
                       line);
}
template <class T>
inline T simd_prefix_exclusive_product(T v, int line = __builtin_LINE()) {
  return emu_d::run<T>(emu_d::prefix<T, emu_d::OpMul, false>, v, 0, "simd_prefix_exclusive_product",
                       line);
}
struct simd_vote {
  typedef uint64_t vote_t;
  uint64_t v;
  uint32_t m;
  explicit operator vote_t() const {
    return v;
  }
  bool all() const {
    return v == m;
  }
  bool any() const {
    return v;
  }
};
inline simd_vote simd_ballot(bool p, int line = __builtin_LINE()) {
  emu_d::Io<uint64_t> x{p, 0, 0, 0};
  emu::collective(emu_d::ballot, &x, "simd_ballot", line);
  return {x.out, (uint32_t)x.k};
}
inline bool simd_all(bool p, int line = __builtin_LINE()) {
  emu_d::Io<uint64_t> x{p, 0, 0, 0};
  emu::collective(emu_d::ballot, &x, "simd_all", line);
  return x.out == (uint32_t)x.k;
}
inline bool simd_any(bool p, int line = __builtin_LINE()) {
  emu_d::Io<uint64_t> x{p, 0, 0, 0};
  emu::collective(emu_d::ballot, &x, "simd_any", line);
  return x.out != 0;
}
inline bool simd_is_first() {
  return emu::cur->lane == 0;
}
inline uint get_simd_lane_id_() {
  return emu::cur->lane;
}
}  // namespace metal
