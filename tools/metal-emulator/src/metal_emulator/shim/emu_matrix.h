// simdgroup_matrix: 8x8, two elements a lane, in the layout that MLX relies on too.
#pragma once
#include "emu_simd.h"
namespace metal {
// ---- simdgroup matrices (8x8, two elements per lane)
namespace emu_d {
// lane -> (row, first column) of the pair it holds
inline constexpr int mrow(int l) {
  return ((l / 4) & 4) + (l / 2) % 4;
}
inline constexpr int mcol(int l) {
  return ((l / 4) & 2) * 2 + (l % 2) * 2;
}
struct Lay {
  uint8_t pos[32];
  constexpr Lay() : pos{} {
    for (int l = 0; l < 32; l++) pos[l] = (uint8_t)(mrow(l) * 8 + mcol(l));
  }
};
inline constexpr Lay LAY;
struct MmaArg {
  const void *a, *b, *c;
  void* d;
};
template <class T>
inline void gather(emu::Simd& s, const void* MmaArg::*f, float* o) {
  for (int i = 0; i < 32; i++) {
    const T* e = (const T*)(((MmaArg*)s.lanes[i].arg)->*f);
    int p = LAY.pos[i];
    o[p] = (float)e[0];
    o[p + 1] = (float)e[1];
  }
}
template <class TD, class TA, class TB, class TC>
void mma(emu::Simd& s, uint32_t m) {
  if (m != 0xffffffffu)
    emu::fail("simdgroup matrix multiply with %d of 32 lanes", __builtin_popcount(m));
  alignas(32) float A[64], B[64], C[64];
  gather<TA>(s, &MmaArg::a, A);
  gather<TB>(s, &MmaArg::b, B);
  if constexpr (!std::is_void_v<TC>)
    gather<TC>(s, &MmaArg::c, C);
  else
    std::memset(C, 0, sizeof C);
  typedef float v8 __attribute__((vector_size(32)));
  v8* Bv = (v8*)B;
  v8* Cv = (v8*)C;
  for (int r = 0; r < 8; r++) {
    v8 acc = Cv[r];
    for (int k = 0; k < 8; k++) {
      v8 a = {A[r * 8 + k], A[r * 8 + k], A[r * 8 + k], A[r * 8 + k],
              A[r * 8 + k], A[r * 8 + k], A[r * 8 + k], A[r * 8 + k]};
#ifdef __FMA__
      acc = (v8)__builtin_ia32_vfmaddps256(a, Bv[k], acc);
#else
      acc = acc + a * Bv[k];
#endif
    }
    Cv[r] = acc;
  }
  for (int i = 0; i < 32; i++) {
    TD* d = (TD*)((MmaArg*)s.lanes[i].arg)->d;
    int p = LAY.pos[i];
    d[0] = (TD)C[p];
    d[1] = (TD)C[p + 1];
  }
  emu::stats->mma++;
}
inline void nop(emu::Simd&, uint32_t) {}
}  // namespace emu_d
template <class T, int Cols = 8, int Rows = 8>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "only 8x8 simdgroup matrices exist");
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>,
                "simdgroup_matrix element type");
  vec<T, 2> e_;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T dval) {
    int l = emu::cur->lane, r = emu_d::mrow(l), c = emu_d::mcol(l);
    e_.d[0] = r == c ? dval : (T)0;
    e_.d[1] = r == c + 1 ? dval : (T)0;
  }  // diagonal
  vec<T, 2>& thread_elements() {
    return e_;
  }
  const vec<T, 2>& thread_elements() const {
    return e_;
  }
};
template <class T, int C = 8, int R = 8, class S>
inline simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(S v) {
  simdgroup_matrix<T, C, R> m;
  m.e_.d[0] = m.e_.d[1] = (T)v;
  return m;
}
template <class T, int C = 8, int R = 8, class S>
inline simdgroup_matrix<T, C, R> make_diagonal_simdgroup_matrix(S v) {
  return simdgroup_matrix<T, C, R>((T)v);
}
#ifdef EMU_CHECK
#define EMU_CONV(op) emu::collective(emu_d::nop, nullptr, op, line)
#else
#define EMU_CONV(op) ((void)line)
#endif
template <class T, class P>
inline void emu_sg_load(simdgroup_matrix<T, 8, 8>& d, const P* src, ulong epr, ulong2 o, bool tr,
                        int line) {
  static_assert(std::is_same_v<T, std::remove_cv_t<P>>,
                "simdgroup_load: pointer and matrix element types differ");
  EMU_CONV("simdgroup_load");
  int l = emu::cur->lane, r = emu_d::mrow(l), c = emu_d::mcol(l);
  const P* b = src + o.d[1] * epr + o.d[0];
  if (tr) {
    d.e_.d[0] = b[c * epr + r];
    d.e_.d[1] = b[(c + 1) * epr + r];
  } else {
    d.e_.d[0] = b[r * epr + c];
    d.e_.d[1] = b[r * epr + c + 1];
  }
}
template <class T>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const T* src, ulong epr = 8,
                           ulong2 o = ulong2(0, 0), bool tr = false, int line = __builtin_LINE()) {
  emu_sg_load(d, src, epr, o, tr, line);
}
template <class T>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const T* src, ulong epr, int zero, bool tr,
                           int line = __builtin_LINE()) {
  (void)zero;
  emu_sg_load(d, src, epr, ulong2(0, 0), tr, line);
}
template <class T>
inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& s, T* dst, ulong epr = 8,
                            ulong2 o = ulong2(0, 0), bool tr = false, int line = __builtin_LINE()) {
  EMU_CONV("simdgroup_store");
  int l = emu::cur->lane, r = emu_d::mrow(l), c = emu_d::mcol(l);
  T* b = dst + o.d[1] * epr + o.d[0];
  if (tr) {
    b[c * epr + r] = s.e_.d[0];
    b[(c + 1) * epr + r] = s.e_.d[1];
  } else {
    b[r * epr + c] = s.e_.d[0];
    b[r * epr + c + 1] = s.e_.d[1];
  }
}
template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                          const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b,
                                          const simdgroup_matrix<C, 8, 8>& c,
                                          int line = __builtin_LINE()) {
  emu_d::MmaArg x{&a.e_, &b.e_, &c.e_, &d.e_};
  emu::collective(emu_d::mma<D, A, B, C>, &x, "simdgroup_multiply_accumulate", line);
}
template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b, int line = __builtin_LINE()) {
  emu_d::MmaArg x{&a.e_, &b.e_, nullptr, &d.e_};
  emu::collective(emu_d::mma<D, A, B, void>, &x, "simdgroup_multiply", line);
}
template <class T>
inline simdgroup_matrix<T, 8, 8> operator*(const simdgroup_matrix<T, 8, 8>& a,
                                           const simdgroup_matrix<T, 8, 8>& b) {
  simdgroup_matrix<T, 8, 8> r;
  simdgroup_multiply(r, a, b);
  return r;
}
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
}  // namespace metal
