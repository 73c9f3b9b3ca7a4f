// A launch: threadgroups in order, each in fibers, in forked workers with shared buffers.
// Part of emu_rt.cpp.
#pragma once
#include "emu_check.h"
namespace emu {
static void on_segv(int sig, siginfo_t* si, void*) {
  char* a = (char*)si->si_addr;
  const char* what = "";
  static char b[160];
  for (auto& r : regions)
    if (a >= r.hi && a < r.hi + (1 << 16)) {
      snprintf(b, sizeof b, " (%zd bytes past the end of buffer %d)", a - r.hi, r.idx);
      what = b;
    }
  if (a >= stacks - 65536 && a < stacks + nstacks * stack_sz)
    what = " (inside the lane stacks: stack overflow?)";
  size_t n = strlen(rep->msg);
  snprintf(rep->msg + n, 300, "[error] tg=(%u,%u,%u) thread=%d: signal %d at address %p%s\n",
           dims.gid[0], dims.gid[1], dims.gid[2], cur ? cur->tid : -1, sig, (void*)a, what);
  rep->status = 2;
  _exit(2);
}

static void run_group() {
  unsigned nt = dims.nthreads;
  int ns = (int)(nt + 31) / 32;
  dims.nsimd = ns;
  tg_epoch++;
  tg_serial++;
  memset(arena, 0xff, arena_used);
  for (int g = 0; g < ns; g++) {
    Simd& s = simds_[g];
    s.lanes = &lanes_[g * 32];
    s.n = (int)std::min(32u, nt - g * 32);
    s.index = g;
    s.arrived = s.ndone = s.nbar = 0;
    s.mixed = false;
    s.epoch++;
    for (int i = 0; i < s.n; i++) {
      Lane& l = s.lanes[i];
      unsigned t = g * 32 + i;
      l.sg = &s;
      l.st = READY;
      l.lane = (uint8_t)i;
      l.tid = (uint16_t)t;
      l.px = t % dims.ltg[0];
      l.py = t / dims.ltg[0] % dims.ltg[1];
      l.pz = t / (dims.ltg[0] * dims.ltg[1]);
      l.stack = stacks + (size_t)t * stack_sz;
      uintptr_t top = ((uintptr_t)l.stack + stack_sz - 64 - (t % 16) * 64) &
                      ~(uintptr_t)15;  // colour the tops: avoid cache aliasing
      void** sp = (void**)top;
      *--sp = nullptr;
      *--sp = (void*)fiber_main;
      for (int k = 0; k < 6; k++) *--sp = nullptr;
      l.sp = sp;
    }
  }
}
static unsigned rng_state = 1;
static unsigned rnd() {
  rng_state = rng_state * 1664525u + 1013904223u;
  return rng_state >> 8;
}

static void exec_group(int order) {
  run_group();
  int ns = dims.nsimd;
  int idx[32];
  for (int i = 0; i < ns; i++) idx[i] = i;
  for (;;) {
    if (order == 1)
      std::reverse(idx, idx + ns);
    if (order >= 2)
      for (int i = ns - 1; i > 0; i--) std::swap(idx[i], idx[rnd() % (i + 1)]);
    for (int q = 0; q < ns; q++) {
      Simd& s = simds_[idx[q]];
      for (;;) {
        Lane* f = nullptr;
        int st = order >= 2 ? (int)(rnd() % s.n) : order == 1 ? s.n - 1 : 0;
        for (int i = 0; i < s.n && !f; i++) {
          int j = order == 1 ? st - i : (st + i) % s.n;
          if (s.lanes[j].st == READY)
            f = &s.lanes[j];
        }
        if (f) {
          cur = f;
          emu_switch(&main_sp, f->sp);
          continue;
        }
        if (s.arrived) {
          resolve(&s);
          continue;
        }
        break;
      }
    }
    int nbar = 0, ndone = 0;
    Lane* b = nullptr;
    for (int g = 0; g < ns; g++) {
      nbar += simds_[g].nbar;
      ndone += simds_[g].ndone;
    }
    if (!nbar)
      break;
    for (unsigned t = 0; t < dims.nthreads && !b; t++)
      if (lanes_[t].st == BAR)
        b = &lanes_[t];
    cur = b;
    bool same = true;
    for (unsigned t = 0; t < dims.nthreads; t++)
      if (lanes_[t].st == BAR && lanes_[t].line != b->line)
        same = false;
    if (ndone || !same) {
      size_t n = strlen(rep->msg);
      snprintf(rep->msg + n, 300,
               "[error] threadgroup_barrier divergence in threadgroup (%u,%u,%u): %d of %u threads "
               "wait, %d returned%s\n",
               dims.gid[0], dims.gid[1], dims.gid[2], nbar, dims.nthreads, ndone,
               same ? "" : ", at different barriers");
      for (int g = 0; g < ns; g++) describe(&simds_[g]);
      rep->status = 2;
      _exit(2);
    }
    stats->barriers++;
    if (b->flags & 2) {
      tg_epoch++;
    }
    for (unsigned t = 0; t < dims.nthreads; t++) lanes_[t].st = READY;
    for (int g = 0; g < ns; g++) simds_[g].nbar = 0;
  }
  stats->groups++;
}
static int phdr_cb(struct dl_phdr_info* i, size_t, void* d) {
  for (int k = 0; k < i->dlpi_phnum; k++)
    if (i->dlpi_phdr[k].p_type == PT_LOAD) {
      uintptr_t lo = i->dlpi_addr + i->dlpi_phdr[k].p_vaddr, hi = lo + i->dlpi_phdr[k].p_memsz;
      if ((uintptr_t)d >= lo && (uintptr_t)d < hi) {  // second pass collects the whole module
        mod_lo = ~(uintptr_t)0;
        mod_hi = 0;
        for (int q = 0; q < i->dlpi_phnum; q++)
          if (i->dlpi_phdr[q].p_type == PT_LOAD) {
            mod_lo = std::min<uintptr_t>(mod_lo, i->dlpi_addr + i->dlpi_phdr[q].p_vaddr);
            mod_hi = std::max<uintptr_t>(
                mod_hi, i->dlpi_addr + i->dlpi_phdr[q].p_vaddr + i->dlpi_phdr[q].p_memsz);
          }
        return 1;
      }
    }
  return 0;
}
}  // namespace emu

using namespace emu;
extern "C" {
struct EmuLaunch {
  void (*entry)(void**);
  void** args;  // pointers in buffer-index order
  void** buf;
  uint64_t* size;
  int* out;
  int nbuf;
  unsigned grid[3], tg[3];
  int nproc, order, strict, sum_order, ftz, check, seed, maxgroups;
  uint64_t stack_kb;
  uint64_t tg_limit;
  char* msg;
  int msgcap;
  Stats* st;
};
__attribute__((visibility("default"))) void* emu_alloc(uint64_t n) {
  uint64_t pg = 4096, len = (n + pg - 1) / pg * pg;
  if (!len)
    len = pg;
  char* m = (char*)mmap(nullptr, len + 16 * pg, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                        -1, 0);
  if (m == MAP_FAILED)
    return nullptr;
  mprotect(m + len, 16 * pg, PROT_NONE);
  return m + len - (n + 15) / 16 * 16;
}
__attribute__((visibility("default"))) void emu_free(void* p, uint64_t n) {
  uint64_t pg = 4096, len = (n + pg - 1) / pg * pg;
  if (!len)
    len = pg;
  munmap((char*)p + (n + 15) / 16 * 16 - len, len + 16 * pg);
}
__attribute__((visibility("default"))) int emu_launch(EmuLaunch* L) {
  int np = L->nproc < 1 ? 1 : L->nproc;
  Report* reps = (Report*)mmap(nullptr, sizeof(Report) * np, PROT_READ | PROT_WRITE,
                               MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pid_t pid[64];
  fflush(stdout);
  for (int c = 0; c < np; c++) {
    pid[c] = fork();
    if (pid[c] == 0) {
      rep = &reps[c];
      stats = &rep->st;
      entry = L->entry;
      static void* args_[64];
      for (int i = 0; i < L->nbuf; i++) args_[i] = L->args[i];
      argv_ = args_;
      strict = L->strict;
      sum_order = L->sum_order;
      check_on = L->check;
      rng_state = (unsigned)L->seed * 2654435761u + 12345u;
      tg_limit = L->tg_limit;
      stack_sz = L->stack_kb << 10;
      arena = (char*)mmap(nullptr, arena_cap, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                          -1, 0);
      unsigned nt = L->tg[0] * L->tg[1] * L->tg[2];
      nstacks = nt;
      stacks = (char*)mmap(nullptr, nstacks * stack_sz + 65536, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      mprotect(stacks, 65536, PROT_NONE);
      stacks += 65536;
      for (int i = 0; i < L->nbuf; i++)
        regions.push_back({(char*)L->buf[i], (char*)L->buf[i] + L->size[i], i, L->out[i] != 0});
      if (check_on) {
        shadow = (Sh*)calloc(arena_cap, sizeof(Sh));
        dshadow.resize(L->nbuf);
        for (int i = 0; i < L->nbuf; i++)
          if (L->out[i])
            dshadow[i].resize(L->size[i]);
        dl_iterate_phdr(phdr_cb, (void*)L->entry);
      }
      stack_t ss;
      ss.ss_sp = malloc(1 << 16);
      ss.ss_size = 1 << 16;
      ss.ss_flags = 0;
      sigaltstack(&ss, nullptr);
      struct sigaction sa;
      memset(&sa, 0, sizeof sa);
      sa.sa_sigaction = on_segv;
      sa.sa_flags = SA_SIGINFO | SA_ONSTACK;
      for (int sg : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(sg, &sa, nullptr);
      unsigned csr = _mm_getcsr();
      if (L->ftz)
        csr |= 0x8040;
      _mm_setcsr(csr);
      for (int d = 0; d < 3; d++) {
        dims.grid[d] = L->grid[d];
        dims.tg[d] = L->tg[d];
        dims.ng[d] = (L->grid[d] + L->tg[d] - 1) / L->tg[d];
      }
      uint64_t total = (uint64_t)dims.ng[0] * dims.ng[1] * dims.ng[2], done = 0;
      for (uint64_t q = c; q < total; q += np) {
        uint64_t g = L->order == 1 ? total - 1 - q : q;
        if (L->order >= 2 &&
            total > 1) {  // a fixed odd-multiplier walk visits every group once when coprime
          uint64_t mul = 2654435761u % total;
          if (!mul)
            mul = 1;
          auto gcd = [](uint64_t a, uint64_t b) {
            while (b) {
              uint64_t t = a % b;
              a = b;
              b = t;
            }
            return a;
          };
          while (gcd(mul, total) != 1) mul++;
          g = (q * mul + (uint64_t)L->seed) % total;
        }
        dims.gid[0] = (unsigned)(g % dims.ng[0]);
        dims.gid[1] = (unsigned)(g / dims.ng[0] % dims.ng[1]);
        dims.gid[2] = (unsigned)(g / dims.ng[0] / dims.ng[1]);
        dims.nthreads = 1;
        for (int d = 0; d < 3; d++) {
          unsigned o = dims.gid[d] * dims.tg[d];
          dims.ltg[d] = std::min(dims.tg[d], dims.grid[d] - o);
          dims.nthreads *= dims.ltg[d];
        }
        exec_group(L->order);
        if (L->maxgroups && ++done >= (uint64_t)L->maxgroups)
          break;
      }
      _exit(0);
    }
  }
  int rc = 0;
  size_t used = 0;
  L->msg[0] = 0;
  memset(L->st, 0, sizeof *L->st);
  for (int c = 0; c < np; c++) {
    int w = 0;
    waitpid(pid[c], &w, 0);
    if (reps[c].status || !WIFEXITED(w) || WEXITSTATUS(w))
      rc = 2;
    if (WIFSIGNALED(w))
      used += snprintf(L->msg + used, L->msgcap - used, "[error] worker killed by signal %d\n",
                       WTERMSIG(w));
    if (used + 1 < (size_t)L->msgcap)
      used += snprintf(L->msg + used, L->msgcap - used, "%s", reps[c].msg);
    if (used > (size_t)L->msgcap)
      used = L->msgcap - 1;
    if (rc == 0 && reps[c].nwarn)
      rc = 1;
    Stats& s = reps[c].st;
    L->st->coll += s.coll;
    L->st->mma += s.mma;
    L->st->barriers += s.barriers;
    L->st->sgbarriers += s.sgbarriers;
    L->st->groups += s.groups;
    L->st->simdloads += s.simdloads;
    if (s.tgmem > L->st->tgmem)
      L->st->tgmem = s.tgmem;
    for (int i = 0; i < 32; i++) {
      L->st->rd_bytes[i] += s.rd_bytes[i];
      L->st->wr_bytes[i] += s.wr_bytes[i];
    }
  }
  munmap(reps, sizeof(Report) * np);
  return rc;
}
}
