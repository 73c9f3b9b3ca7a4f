// Lanes as fibers: switching, simdgroup rendezvous, barriers, threadgroup memory, divergence.
// Part of emu_rt.cpp.
#pragma once
#include "emu_rt.h"
#include <cstdarg>
#include <csignal>
#include <csetjmp>
#include <vector>
#include <algorithm>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <ucontext.h>
#include <link.h>
#include <immintrin.h>

namespace emu {
Lane* cur = nullptr;
Dims dims;
Stats* stats = nullptr;
int strict = 1;
int sum_order = 0;
uint32_t tg_epoch = 1;

struct Report {
  int status;
  int nwarn;
  char msg[1 << 15];
  Stats st;
};
static Report* rep = nullptr;

static void vput(const char* tag, const char* fmt, va_list ap) {
  size_t n = strlen(rep->msg);
  if (n + 512 > sizeof rep->msg)
    return;
  n += snprintf(rep->msg + n, 200, "[%s] tg=(%u,%u,%u) simd=%d lane=%d thread=%d: ", tag,
                dims.gid[0], dims.gid[1], dims.gid[2], cur ? cur->sg->index : -1,
                cur ? cur->lane : -1, cur ? cur->tid : -1);
  n += vsnprintf(rep->msg + n, sizeof rep->msg - n - 2, fmt, ap);
  rep->msg[n] = '\n';
  rep->msg[n + 1] = 0;
}
void fail(const char* fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  vput("error", fmt, ap);
  va_end(ap);
  rep->status = 2;
  _exit(2);
}
void warn(const char* fmt, ...) {
  if (rep->nwarn++ < 40) {
    va_list ap;
    va_start(ap, fmt);
    vput("warning", fmt, ap);
    va_end(ap);
  }
}

// ---------------------------------------------------------------- fibers
extern "C" EMU_HID void emu_switch(void** save, void* to);
asm(R"(
.text
.hidden emu_switch
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch,.-emu_switch
)");

static void* main_sp;
static void (*entry)(void**);
static void** argv_;
static Lane lanes_[1024];
static Simd simds_[32];
static char* stacks;
static size_t stack_sz = 256 << 10;
static size_t nstacks = 0;

static inline void to(Lane* l) {
  Lane* c = cur;
  cur = l;
  emu_switch(&c->sp, l->sp);
}
static inline void to_main() {
  Lane* c = cur;
  emu_switch(&c->sp, main_sp);
}

// leave the current lane: go to another runnable lane of the same simdgroup, else to the scheduler
static void yield_lane() {
  Simd* s = cur->sg;
  int n = s->n, b = cur->lane;
  for (int i = 1; i < n; i++) {
    int j = b + i;
    if (j >= n)
      j -= n;
    if (s->lanes[j].st == READY) {
      to(&s->lanes[j]);
      return;
    }
  }
  to_main();
}
static void fiber_main() {
  entry(argv_);
  cur->st = DONE;
  cur->sg->ndone++;
  yield_lane();
  __builtin_unreachable();
}

void collective(CollFn fn, void* arg, const char* op, int line) {
  Lane* l = cur;
  Simd* s = l->sg;
  l->fn = fn;
  l->arg = arg;
  l->op = op;
  l->line = line;
  if (s->arrived == 0)
    s->mixed = false;
  else if (!s->mixed) {
    for (int i = 0; i < s->n; i++)
      if (s->lanes[i].st == SIMD) {
        if (s->lanes[i].fn != fn || s->lanes[i].line != line)
          s->mixed = true;
        break;
      }
  }
  if (++s->arrived == s->n && !s->mixed) {
    s->arrived = 0;
    stats->coll++;
    fn(*s, s->n == 32 ? 0xffffffffu : ((1u << s->n) - 1));
    for (int i = 0; i < s->n; i++) s->lanes[i].st = READY;
    return;  // this lane simply goes on
  }
  l->st = SIMD;
  yield_lane();
}

void tg_barrier(int flags, int line) {
  Lane* l = cur;
  l->st = BAR;
  l->line = line;
  l->op = "threadgroup_barrier";
  l->flags = (uint16_t)flags;
  l->sg->nbar++;
  yield_lane();
}
static void fn_sgbar(Simd& s, uint32_t) {
  s.epoch++;
  stats->sgbarriers++;
}
void sg_barrier(int, int line) {
  collective(fn_sgbar, nullptr, "simdgroup_barrier", line);
}

// ---------------------------------------------------------------- threadgroup memory
static char* arena;
static size_t arena_cap = 1 << 20, arena_used = 0;
static size_t tg_limit = 32768;
void* tg_mem(int* off, size_t size, size_t align) {
  if (*off < 0) {
    arena_used = (arena_used + align - 1) / align * align;
    *off = (int)arena_used;
    arena_used += size;
    size_t pure = arena_used;
    if (pure > stats->tgmem)
      stats->tgmem = pure;
    if (pure > tg_limit)
      fail("threadgroup memory %zu bytes exceeds the %zu byte limit", pure, tg_limit);
    memset(arena + *off, 0xff, size);
  }
  return arena + *off;
}

// ---------------------------------------------------------------- divergence resolution
static void describe(Simd* s) {
  for (int i = 0; i < s->n;) {
    int j = i;
    Lane& a = s->lanes[i];
    while (j + 1 < s->n && s->lanes[j + 1].st == a.st &&
           (a.st == DONE || (s->lanes[j + 1].line == a.line && s->lanes[j + 1].op == a.op)))
      j++;
    size_t n = strlen(rep->msg);
    if (n + 200 < sizeof rep->msg) {
      if (a.st == DONE)
        snprintf(rep->msg + n, 200, "    lanes %d..%d: returned from the kernel\n", i, j);
      else
        snprintf(rep->msg + n, 200, "    lanes %d..%d: in %s at line %d\n", i, j, a.op, a.line);
    }
    i = j + 1;
  }
}
// no lane of s can run; some wait in collectives
static void resolve(Simd* s) {
  int line = 1 << 30;
  CollFn fn = nullptr;
  Lane* first = nullptr;
  for (int i = 0; i < s->n; i++) {
    Lane& l = s->lanes[i];
    if (l.st == SIMD && l.line < line) {
      line = l.line;
      fn = l.fn;
      first = &l;
    }
  }
  if (!first)
    return;
  cur = first;
  if (strict) {
    size_t n = strlen(rep->msg);
    snprintf(rep->msg + n, 400,
             "[error] divergent %s at line %d in simdgroup %d of threadgroup (%u,%u,%u): not all "
             "%d lanes reach it\n",
             first->op, line, s->index, dims.gid[0], dims.gid[1], dims.gid[2], s->n);
    describe(s);
    rep->status = 2;
    _exit(2);
  }
  uint32_t m = 0;
  int k = 0;
  for (int i = 0; i < s->n; i++) {
    Lane& l = s->lanes[i];
    if (l.st == SIMD && l.line == line && l.fn == fn) {
      m |= 1u << i;
      k++;
    }
  }
  stats->coll++;
  fn(*s, m);
  for (int i = 0; i < s->n; i++)
    if (m >> i & 1)
      s->lanes[i].st = READY;
  s->arrived -= k;
  s->mixed = false;
  // recompute whether the rest is homogeneous
  Lane* f = nullptr;
  for (int i = 0; i < s->n; i++)
    if (s->lanes[i].st == SIMD) {
      if (!f)
        f = &s->lanes[i];
      else if (f->fn != s->lanes[i].fn || f->line != s->lanes[i].line)
        s->mixed = true;
    }
}
}  // namespace emu
