// Runtime interface: fibers for lanes, simdgroup rendezvous, threadgroup barriers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <cstdlib>

#define EMU_HID __attribute__((visibility("hidden")))
namespace emu {

enum St : uint8_t { READY, SIMD, BAR, DONE };

struct Simd;
typedef void (*CollFn)(Simd&, uint32_t mask);

struct Lane {
  void* sp;  // saved stack pointer
  Simd* sg;
  void* arg;  // collective argument block (lives on the lane's own stack)
  CollFn fn;
  const char* op;  // name of the operation it waits in
  int line;        // source line it waits at
  St st;
  uint8_t lane;  // index in simdgroup
  uint16_t tid;  // linear index in threadgroup
  uint16_t flags;
  unsigned px, py, pz;  // position in threadgroup
  char* stack;
};

struct Simd {
  Lane* lanes;  // n consecutive lanes
  int n, index;
  int arrived, ndone, nbar;
  bool mixed;
  uint32_t epoch;
};

struct Dims {
  unsigned grid[3], tg[3];  // threads in grid, nominal threadgroup size
  unsigned ng[3];           // threadgroups per grid
  unsigned gid[3];          // this threadgroup
  unsigned ltg[3];          // size of THIS threadgroup (edge groups are smaller)
  unsigned nthreads, nsimd;
};

struct Stats {
  uint64_t coll, mma, barriers, sgbarriers, groups, tgmem, simdloads;
  uint64_t rd_bytes[32], wr_bytes[32];
};

extern EMU_HID Lane* cur;
extern EMU_HID Dims dims;
extern EMU_HID Stats* stats;
extern EMU_HID int strict;     // 1: any divergence at a collective is an error
extern EMU_HID int sum_order;  // reduction tree used by simd_sum & co
extern EMU_HID uint32_t tg_epoch;

EMU_HID void collective(CollFn fn, void* arg, const char* op, int line);
EMU_HID void tg_barrier(int flags, int line);
EMU_HID void sg_barrier(int flags, int line);
EMU_HID void* tg_mem(int* off, size_t size, size_t align);
[[noreturn]] EMU_HID void fail(const char* fmt, ...) __attribute__((format(printf, 1, 2)));
EMU_HID void warn(const char* fmt, ...) __attribute__((format(printf, 1, 2)));

template <class T, int ID>
struct TgSlot {
  static inline int off = -1;
};
template <class T, int ID>
inline T& tg_get() {
  return *(T*)tg_mem(&TgSlot<T, ID>::off, sizeof(T), alignof(T) < 16 ? 16 : alignof(T));
}

}  // namespace emu
