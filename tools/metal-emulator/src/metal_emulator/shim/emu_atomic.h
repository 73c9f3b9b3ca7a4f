// Atomics on compiler builtins.
#pragma once
#include "emu_matrix.h"
namespace metal {
// ---- atomics
enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T v;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;
template <class T, class F>
inline T emu_rmw(atomic<T>* a, F f) {
  using U = std::conditional_t<sizeof(T) == 8, uint64_t,
                               std::conditional_t<sizeof(T) == 4, uint32_t, uint8_t>>;
  static_assert(sizeof(U) == sizeof(T));
  U* p = (U*)&a->v;
  U o = __atomic_load_n(p, __ATOMIC_RELAXED);
  for (;;) {
    T ov;
    __builtin_memcpy(&ov, &o, sizeof o);
    T nv = f(ov);
    U n;
    __builtin_memcpy(&n, &nv, sizeof n);
    if (__atomic_compare_exchange_n(p, &o, n, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      return ov;
  }
}
template <class T>
inline T atomic_load_explicit(const atomic<T>* a, memory_order) {
  return ((volatile const atomic<T>*)a)->v;
}
template <class T>
inline void atomic_store_explicit(atomic<T>* a, T v, memory_order) {
  emu_rmw(a, [&](T) { return v; });
}
template <class T>
inline T atomic_exchange_explicit(atomic<T>* a, T v, memory_order) {
  return emu_rmw(a, [&](T) { return v; });
}
template <class T, class S>
inline T atomic_fetch_add_explicit(atomic<T>* a, S v, memory_order) {
  return emu_rmw(a, [&](T o) { return (T)(o + (T)v); });
}
template <class T, class S>
inline T atomic_fetch_sub_explicit(atomic<T>* a, S v, memory_order) {
  return emu_rmw(a, [&](T o) { return (T)(o - (T)v); });
}
template <class T, class S>
inline T atomic_fetch_max_explicit(atomic<T>* a, S v, memory_order) {
  return emu_rmw(a, [&](T o) { return o < (T)v ? (T)v : o; });
}
template <class T, class S>
inline T atomic_fetch_min_explicit(atomic<T>* a, S v, memory_order) {
  return emu_rmw(a, [&](T o) { return (T)v < o ? (T)v : o; });
}
template <class T, class S>
inline T atomic_fetch_or_explicit(atomic<T>* a, S v, memory_order) {
  return emu_rmw(a, [&](T o) { return (T)(o | (T)v); });
}
template <class T, class S>
inline T atomic_fetch_and_explicit(atomic<T>* a, S v, memory_order) {
  return emu_rmw(a, [&](T o) { return (T)(o & (T)v); });
}
template <class T>
inline bool atomic_compare_exchange_weak_explicit(atomic<T>* a, T* e, T d, memory_order,
                                                  memory_order) {
  bool ok = false;
  T o = emu_rmw(a, [&](T x) {
    ok = std::memcmp(&x, e, sizeof x) == 0;
    return ok ? d : x;
  });
  if (!ok)
    *e = o;
  return ok;
}
}  // namespace metal

