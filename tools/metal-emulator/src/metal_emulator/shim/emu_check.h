// Access checking: the compiler calls these hooks when a kernel is built with -fsanitize=thread and
// -fsanitize=alignment,bounds. Races, bounds, read-only inputs, bytes requested. Part of emu_rt.cpp.
#pragma once
#include "emu_fibers.h"
namespace emu {

struct Region {
  char* lo;
  char* hi;
  int idx;
  bool out;
};
static std::vector<Region> regions;
struct Sh {
  uint32_t wep, wse, rep_, rse;
  uint16_t w, r;
  uint8_t rmulti, wset, rset, rsgmix;
};
static Sh* shadow;
static int check_on = 0;
struct DSh {
  uint32_t tg;
  uint16_t w;
  uint8_t set;
};
static std::vector<std::vector<DSh>> dshadow;
static uint32_t tg_serial = 0;
static uintptr_t mod_lo, mod_hi;

static bool ordered(int a, int b, uint32_t sep, uint32_t sep_now) {  // two lanes, same tg epoch
  if (a == b)
    return true;
  return (a >> 5) == (b >> 5) && sep != sep_now;  // same simdgroup, a simdgroup_barrier in between
}
static void tg_access(size_t off, int n, bool wr) {
  int me = cur->tid;
  uint32_t se = cur->sg->epoch;
  for (int i = 0; i < n; i++) {
    Sh& h = shadow[off + i];
    if (h.wset && h.wep == tg_epoch && !ordered(h.w, me, h.wse, se)) {
      warn(
          "threadgroup memory race: byte %zu %s by thread %d, written by thread %d with no barrier "
          "in between%s",
          off + i, wr ? "written" : "read", me, h.w,
          (h.w >> 5) == (me >> 5) ? " (same simdgroup: a simdgroup_barrier would do)" : "");
      h.wset = 0;
      return;
    }
    if (wr) {
      if (h.rset && h.rep_ == tg_epoch) {
        bool bad = h.rmulti ? !(!h.rsgmix && (h.r >> 5) == (me >> 5) && h.rse != se)
                            : !ordered(h.r, me, h.rse, se);
        if (bad) {
          warn(
              "threadgroup memory race: byte %zu written by thread %d, read by thread %d%s with no "
              "barrier in between",
              off + i, me, h.r, h.rmulti ? " and others" : "");
          h.rset = 0;
          return;
        }
      }
      h.w = (uint16_t)me;
      h.wep = tg_epoch;
      h.wse = se;
      h.wset = 1;
      h.rset = 0;
    } else {
      if (h.rset && h.rep_ == tg_epoch) {
        if (h.r != me) {
          h.rmulti = 1;
          if ((h.r >> 5) != (me >> 5))
            h.rsgmix = 1;
        }
        h.rse = se;
      } else {
        h.rset = 1;
        h.r = (uint16_t)me;
        h.rep_ = tg_epoch;
        h.rse = se;
        h.rmulti = 0;
        h.rsgmix = 0;
      }
    }
  }
}
static void access(void* p, int n, bool wr) {
  if (!check_on || !cur)
    return;
  char* a = (char*)p;
  if (a >= stacks && a < stacks + nstacks * stack_sz)
    return;
  if (a >= arena && a < arena + arena_cap) {
    if (a + n > arena + arena_used)
      fail("threadgroup memory access past the end of all arrays (offset %zd)", a - arena);
    tg_access(a - arena, n, wr);
    return;
  }
  for (auto& r : regions)
    if (a >= r.lo && a < r.hi) {
      if (a + n > r.hi)
        fail("%s of %d bytes runs past the end of buffer %d", wr ? "write" : "read", n, r.idx);
      if (wr && !r.out)
        fail("write to input buffer %d at byte %zd", r.idx, a - r.lo);
      (wr ? stats->wr_bytes : stats->rd_bytes)[r.idx] += n;
      if ((uintptr_t)a % n && (n & (n - 1)) == 0)
        warn("misaligned %d-byte access to buffer %d at byte %zd", n, r.idx, a - r.lo);
      if (r.out) {
        auto& d = dshadow[r.idx];
        size_t o = a - r.lo;
        for (int i = 0; i < n; i++) {
          DSh& h = d[o + i];
          if (h.set && !(h.tg == tg_serial && h.w == cur->tid)) {
            warn("buffer %d byte %zu %s by two different threads", r.idx, o + i,
                 wr ? "written" : "written then read");
            h.set = 0;
            break;
          }
          if (wr) {
            h.set = 1;
            h.tg = tg_serial;
            h.w = cur->tid;
          }
        }
      }
      return;
    }
  if (a >= (char*)rep && a < (char*)(rep + 1))
    return;
  if ((uintptr_t)a >= mod_lo && (uintptr_t)a < mod_hi)
    return;  // the kernel's own constants
  fail("%s of %d bytes outside every buffer (near: %s)", wr ? "write" : "read", n, [&] {
    static char b[160];
    ptrdiff_t best = PTRDIFF_MAX;
    b[0] = 0;
    for (auto& r : regions) {
      ptrdiff_t d = a < r.lo ? r.lo - a : a - r.hi;
      if (d < best) {
        best = d;
        snprintf(b, sizeof b, a < r.lo ? "%zd bytes before buffer %d" : "%zd bytes past buffer %d",
                 d, r.idx);
      }
    }
    return b;
  }());
}
}  // namespace emu

extern "C" {
#define TS(n)                                       \
  EMU_HID void __tsan_read##n(void* p) {            \
    emu::access(p, n, false);                       \
  }                                                 \
  EMU_HID void __tsan_write##n(void* p) {           \
    emu::access(p, n, true);                        \
  }                                                 \
  EMU_HID void __tsan_unaligned_read##n(void* p) {  \
    emu::access(p, n, false);                       \
  }                                                 \
  EMU_HID void __tsan_unaligned_write##n(void* p) { \
    emu::access(p, n, true);                        \
  }                                                 \
  EMU_HID void __tsan_volatile_read##n(void* p) {   \
    emu::access(p, n, false);                       \
  }                                                 \
  EMU_HID void __tsan_volatile_write##n(void* p) {  \
    emu::access(p, n, true);                        \
  }
TS(1) TS(2) TS(4) TS(8) TS(16) EMU_HID void __tsan_read_range(void* p, size_t n) {
  emu::access(p, (int)n, false);
}
EMU_HID void __tsan_write_range(void* p, size_t n) {
  emu::access(p, (int)n, true);
}
EMU_HID void __tsan_func_entry(void*) {}
EMU_HID void __tsan_func_exit() {}
EMU_HID void __tsan_init() {}
EMU_HID void __tsan_vptr_update(void**, void*) {}
}

extern "C" {
struct ULoc {
  const char* file;
  uint32_t line, col;
};
struct UTM {
  ULoc l;
  void* ty;
  unsigned char la, kind;
};
struct UOB {
  ULoc l;
  void *a, *i;
};
EMU_HID void __ubsan_handle_type_mismatch_v1(UTM* d, uintptr_t p) {
  if (p == 0)
    emu::fail("null pointer access at line %u", d->l.line);
  emu::warn("misaligned access at line %u: needs %d-byte alignment, address is off by %d",
            d->l.line, 1 << d->la, (int)(p & ((1u << d->la) - 1)));
}
EMU_HID void __ubsan_handle_out_of_bounds(UOB* d, uintptr_t i) {
  emu::fail("array index %zd out of bounds at line %u", (ssize_t)i, d->l.line);
}
}

