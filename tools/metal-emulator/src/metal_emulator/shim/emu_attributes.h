// Kernel attributes: what a lane knows about its place in the grid.
#pragma once
#include "emu_atomic.h"
using metal::fma;  // a few names MSL code uses without the namespace even before `using namespace
                   // metal`
using metal::memory_order_relaxed;
using metal::vec;

// ---- kernel attributes
namespace emu {
inline uint3 u3(unsigned a, unsigned b, unsigned c) {
  return uint3(a, b, c);
}
inline uint3 a_thread_position_in_threadgroup() {
  return u3(cur->px, cur->py, cur->pz);
}
inline uint3 a_thread_position_in_grid() {
  return u3(dims.gid[0] * dims.tg[0] + cur->px, dims.gid[1] * dims.tg[1] + cur->py,
            dims.gid[2] * dims.tg[2] + cur->pz);
}
inline uint3 a_threadgroup_position_in_grid() {
  return u3(dims.gid[0], dims.gid[1], dims.gid[2]);
}
inline uint3 a_threads_per_threadgroup() {
  return u3(dims.ltg[0], dims.ltg[1], dims.ltg[2]);
}
inline uint3 a_dispatch_threads_per_threadgroup() {
  return u3(dims.tg[0], dims.tg[1], dims.tg[2]);
}
inline uint3 a_threads_per_grid() {
  return u3(dims.grid[0], dims.grid[1], dims.grid[2]);
}
inline uint3 a_grid_size() {
  return a_threads_per_grid();
}
inline uint3 a_grid_origin() {
  return u3(0, 0, 0);
}
inline uint3 a_threadgroups_per_grid() {
  return u3(dims.ng[0], dims.ng[1], dims.ng[2]);
}
inline uint a_thread_index_in_threadgroup() {
  return cur->tid;
}
inline uint a_thread_index_in_simdgroup() {
  return cur->lane;
}
inline uint a_thread_index_in_quadgroup() {
  return cur->lane & 3;
}
inline uint a_simdgroup_index_in_threadgroup() {
  return (uint)cur->sg->index;
}
inline uint a_quadgroup_index_in_threadgroup() {
  return cur->tid / 4u;
}
inline uint a_simdgroups_per_threadgroup() {
  return dims.nsimd;
}
inline uint a_quadgroups_per_threadgroup() {
  return (dims.nthreads + 3) / 4;
}
inline uint a_dispatch_simdgroups_per_threadgroup() {
  return (dims.tg[0] * dims.tg[1] * dims.tg[2] + 31) / 32;
}
inline uint a_dispatch_quadgroups_per_threadgroup() {
  return (dims.tg[0] * dims.tg[1] * dims.tg[2] + 3) / 4;
}
inline uint a_thread_execution_width() {
  return 32;
}
inline uint a_threads_per_simdgroup() {
  return 32;
}
}  // namespace emu
using float16_t = half;
using bfloat16_t = bfloat;
#define double EMU_double_does_not_exist_in_MSL
