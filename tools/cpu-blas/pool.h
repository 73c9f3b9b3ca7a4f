/* Shares the chunks of one call between the processors. */
#ifndef SPEC_POOL_H
#define SPEC_POOL_H

typedef void (*chunk_fn)(const void *call, int chunk);

/* Runs fn(call, 0) .. fn(call, n - 1), in any order, each once; returns when all are done. */
void pool_run(chunk_fn fn, const void *call, int n);

/* Threads that take part, the caller's included: the processors that this process may use, by its
 * affinity and its control group's quota, or OMP_NUM_THREADS if that is fewer. */
int pool_threads(void);

#endif
