/* Why not OpenMP: its threads wait for each other at the end of every loop, busily, and each has a
 * fixed share. On a machine that does other work too, a thread that lost its processor then holds
 * up the others, which burn theirs waiting: a forward of some hundred short loops becomes five to
 * ten times slower. Here whoever is awake takes the next chunk, the caller first of all, and nobody
 * waits for a thread that has not begun.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef CGROUPS
#define CGROUPS "/sys/fs/cgroup" /* a test has its own */
#endif

enum { SPINS = 1000, MOST = 64 }; /* about 30 us: the gap between two matmuls of a forward */

static struct {
  pthread_mutex_t lock;
  pthread_cond_t begun, ended;
  int threads, sleepers;
  /* the call that is being shared; guarded by the lock, except that `next` is atomic */
  chunk_fn fn;
  const void *call;
  int n, next, open, inside;
  unsigned number; /* of the call; also read without the lock, to see that a new one has come */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER,
          .begun = PTHREAD_COND_INITIALIZER,
          .ended = PTHREAD_COND_INITIALIZER};
static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER; /* one call is shared at a time */
static pthread_once_t started = PTHREAD_ONCE_INIT;

static void take_chunks(chunk_fn fn, const void *call, int n) {
  for (;;) {
    int chunk = __atomic_fetch_add(&pool.next, 1, __ATOMIC_RELAXED);
    if (chunk >= n) return;
    fn(call, chunk);
  }
}

static void *worker(void *unused) {
  unsigned seen = 0;
  (void)unused;
  for (;;) {
    for (int i = 0; i < SPINS && __atomic_load_n(&pool.number, __ATOMIC_RELAXED) == seen; i++)
      _mm_pause();
    pthread_mutex_lock(&pool.lock);
    while (pool.number == seen) {
      pool.sleepers++;
      pthread_cond_wait(&pool.begun, &pool.lock);
      pool.sleepers--;
    }
    seen = pool.number;
    if (pool.open) {
      chunk_fn fn = pool.fn;
      const void *call = pool.call;
      int n = pool.n;
      pool.inside++;
      pthread_mutex_unlock(&pool.lock);
      take_chunks(fn, call, n);
      pthread_mutex_lock(&pool.lock);
      if (--pool.inside == 0) pthread_cond_signal(&pool.ended);
    }
    pthread_mutex_unlock(&pool.lock);
  }
  return NULL;
}

/* A forked child has none of the threads, and perhaps locks that nobody will open. */
static void start_anew(void) {
  pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
  started = once, in_use = mutex, pool.lock = mutex, pool.begun = cond, pool.ended = cond;
  pool.sleepers = pool.inside = pool.open = 0, pool.number = 0;
}

/* Numbers of a file of a control group; returns how many there are. */
static int read_numbers(const char *folder, const char *name, long *first, long *second) {
  char path[4352];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *file = fopen(path, "re");
  if (!file) return 0;
  int found = fscanf(file, "%ld %ld", first, second);
  fclose(file);
  return found;
}

static int within(int most, long quota, long period) {
  if (quota <= 0 || period <= 0) return most;
  long allowed = (quota - 1) / period + 1;
  return allowed < most ? (int)allowed : most;
}

/* Processors that a quota allows (docker --cpus, systemd's CPUQuota), rounded up, at most `most`.
 * The process's group and those above it count; in a container its group is the root. */
static int within_quota(int most) {
  char group[4096] = "", folder[4224], line[4224];
  long quota, period, unused;
  if (read_numbers(CGROUPS "/cpu", "cpu.cfs_quota_us", &quota, &unused) == 1 &&
      read_numbers(CGROUPS "/cpu", "cpu.cfs_period_us", &period, &unused) == 1)
    most = within(most, quota, period); /* version 1 */
  FILE *own = fopen("/proc/self/cgroup", "re");
  while (own && fgets(line, sizeof line, own)) sscanf(line, "0::%4095s", group);
  if (own) fclose(own);
  for (;;) {
    snprintf(folder, sizeof folder, CGROUPS "%s", group);
    if (read_numbers(folder, "cpu.max", &quota, &period) == 2) most = within(most, quota, period);
    char *above = strrchr(group, '/');
    if (!above) return most;
    *above = '\0';
  }
}

static void start(void) {
  static int guarded;
  cpu_set_t set;
  const char *wish = getenv("OMP_NUM_THREADS");
  int threads = sched_getaffinity(0, sizeof set, &set) ? 1 : within_quota(CPU_COUNT(&set));
  if (wish && atoi(wish) > 0 && atoi(wish) < threads) threads = atoi(wish);
  if (threads > MOST) threads = MOST;
  pool.threads = 1;
  for (int i = 1; i < threads; i++) {
    pthread_t id;
    if (pthread_create(&id, NULL, worker, NULL)) break; /* fewer will do */
    pthread_detach(id);
    pool.threads++;
  }
  if (!guarded) guarded = !pthread_atfork(NULL, NULL, start_anew);
}

int pool_threads(void) {
  pthread_once(&started, start);
  return pool.threads;
}

void pool_run(chunk_fn fn, const void *call, int n) {
  if (n < 2 || pool_threads() < 2 || pthread_mutex_trylock(&in_use)) {
    for (int chunk = 0; chunk < n; chunk++) fn(call, chunk);
    return;
  }
  pthread_mutex_lock(&pool.lock);
  pool.fn = fn, pool.call = call, pool.n = n, pool.open = 1;
  __atomic_store_n(&pool.next, 0, __ATOMIC_RELAXED);
  __atomic_store_n(&pool.number, pool.number + 1, __ATOMIC_RELAXED);
  int wake = pool.sleepers > 0;
  pthread_mutex_unlock(&pool.lock);
  if (wake) pthread_cond_broadcast(&pool.begun);
  take_chunks(fn, call, n);
  pthread_mutex_lock(&pool.lock);
  pool.open = 0;
  while (pool.inside) pthread_cond_wait(&pool.ended, &pool.lock);
  pthread_mutex_unlock(&pool.lock);
  pthread_mutex_unlock(&in_use);
}
