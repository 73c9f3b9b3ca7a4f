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
#include <stdlib.h>

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

static void start(void) {
  static int guarded;
  cpu_set_t set;
  const char *wish = getenv("OMP_NUM_THREADS");
  int threads = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
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
