/* A BLAS for MLX on Linux CPU, loaded with LD_PRELOAD.
 *
 * The Linux build of MLX bundles the Netlib reference BLAS: its sgemm is a plain triple loop, so a
 * float32 matmul of w rows costs w times one row, and one row is several times slower than it need
 * be. This file replaces the three entry points MLX calls. It knows nothing about MLX itself.
 *
 * SPEC_BLAS=rows      (default) a call with at most ROWS_MAX rows uses the kernels below; they read
 *                     each weight once for all rows and sum every output in an order that does not
 *                     depend on the number of rows, so a row's bits are the same at every width.
 *                     Larger calls go to OpenBLAS.
 * SPEC_BLAS=openblas  every call goes to OpenBLAS, one row through sgemv: not row-invariant.
 *
 * OpenBLAS is the PyPI package scipy-openblas32, opened on its first use from the folder "openblas"
 * beside this library, so that a preloaded process which never multiplies matrices pays nothing.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112, ROWS_MAX = 40, COLS = 12 };
/* Weights up to which a call is not shared, and chunks for each thread where it is. */
enum { ALONE = 100000, CHUNKS = 8 };

typedef void (*sgemm_fn)(int, int, int, int, int, int, float, const float *, int, const float *,
                         int, float, float *, int);
typedef void (*sgemv_fn)(int, int, int, int, float, const float *, int, const float *, int, float,
                         float *, int);
typedef void (*dgemm_fn)(int, int, int, int, int, int, double, const double *, int, const double *,
                         int, double, double *, int);
typedef void (*cgemm_fn)(int, int, int, int, int, int, const void *, const void *, int,
                         const void *, int, const void *, void *, int);

static struct {
  sgemm_fn sgemm;
  sgemv_fn sgemv;
  dgemm_fn dgemm;
  cgemm_fn cgemm;
} openblas;
static pthread_once_t opened = PTHREAD_ONCE_INIT;
static int by_rows = 1;

/* Calls served by the row kernels: how a caller finds out that the library is in use. */
unsigned long spec_blas_row_calls = 0;

__attribute__((constructor)) static void read_environment(void) {
  const char *value = getenv("SPEC_BLAS");
  by_rows = !(value && !strcmp(value, "openblas"));
}

static void *symbol(void *library, const char *name) {
  void *found = dlsym(library, name);
  if (!found) {
    fprintf(stderr, "[cpu-blas] OpenBLAS must export \"%s\". Run tools/cpu-blas/build.\n", name);
    abort();
  }
  return found;
}

static void open_openblas(void) {
  Dl_info self;
  char path[4096];
  dladdr((void *)open_openblas, &self);
  const char *slash = strrchr(self.dli_fname, '/');
  int folder = slash ? (int)(slash - self.dli_fname) : 1;
  snprintf(path, sizeof path, "%.*s/openblas/scipy_openblas32/lib/libscipy_openblas.so", folder,
           slash ? self.dli_fname : ".");
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    fprintf(stderr, "[cpu-blas] %s must load: %s. Run tools/cpu-blas/build.\n", path, dlerror());
    abort();
  }
  openblas.sgemm = (sgemm_fn)symbol(library, "scipy_cblas_sgemm");
  openblas.sgemv = (sgemv_fn)symbol(library, "scipy_cblas_sgemv");
  openblas.dgemm = (dgemm_fn)symbol(library, "scipy_cblas_dgemm");
  openblas.cgemm = (cgemm_fn)symbol(library, "scipy_cblas_cgemm");
  ((void (*)(int))symbol(library, "scipy_openblas_set_num_threads"))(pool_threads());
}

static inline float sum_lanes(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  s = _mm_add_ss(s, _mm_shuffle_ps(s, s, 1));
  return _mm_cvtss_f32(s);
}

static inline void store(float *out, float alpha, float sum, float beta) {
  *out = beta == 0.0f ? alpha * sum : alpha * sum + beta * *out;
}

/* c[i][j] = alpha * dot(a_i, b_j) + beta * c[i][j] for MR rows of a and NR rows of b. Every tile
 * shape sums one element in the same order, which is what makes a row independent of its tile. */
#define NT_KERNEL(MR, NR)                                                                         \
  static void nt_##MR##x##NR(int k, float alpha, const float *a, int lda, const float *b, int ldb, \
                             float beta, float *c, int ldc) {                                     \
    __m256 acc[MR][NR];                                                                           \
    for (int i = 0; i < MR; i++)                                                                  \
      for (int j = 0; j < NR; j++) acc[i][j] = _mm256_setzero_ps();                               \
    int p = 0;                                                                                    \
    for (; p + 8 <= k; p += 8) {                                                                  \
      __m256 w[NR];                                                                               \
      for (int j = 0; j < NR; j++) w[j] = _mm256_loadu_ps(b + (long)j * ldb + p);                 \
      for (int i = 0; i < MR; i++) {                                                              \
        __m256 x = _mm256_loadu_ps(a + (long)i * lda + p);                                        \
        for (int j = 0; j < NR; j++) acc[i][j] = _mm256_fmadd_ps(x, w[j], acc[i][j]);             \
      }                                                                                           \
    }                                                                                             \
    for (int i = 0; i < MR; i++)                                                                  \
      for (int j = 0; j < NR; j++) {                                                              \
        float s = sum_lanes(acc[i][j]);                                                           \
        for (int q = p; q < k; q++)                                                               \
          s = __builtin_fmaf(a[(long)i * lda + q], b[(long)j * ldb + q], s);                      \
        store(c + (long)i * ldc + j, alpha, s, beta);                                             \
      }                                                                                           \
  }
NT_KERNEL(1, 12)
NT_KERNEL(2, 6)
NT_KERNEL(3, 4)
NT_KERNEL(4, 3)
NT_KERNEL(1, 1)
NT_KERNEL(2, 1)
NT_KERNEL(3, 1)
NT_KERNEL(4, 1)

#define TILES(MR, NR)                                                                        \
  for (; j + NR <= n; j += NR)                                                               \
  nt_##MR##x##NR(k, alpha, ai, lda, b + (long)j * ldb, ldb, beta, ci + j, ldc)

/* n <= COLS rows of b stay in the inner caches while every tile of a passes over them. */
static void nt_block(int m, int n, int k, float alpha, const float *a, int lda, const float *b,
                     int ldb, float beta, float *c, int ldc) {
  for (int i = 0; i < m;) {
    int rows = m - i >= 4 ? 4 : m - i, j = 0;
    const float *ai = a + (long)i * lda;
    float *ci = c + (long)i * ldc;
    switch (rows) {
      case 4: TILES(4, 3); TILES(4, 1); break;
      case 3: TILES(3, 4); TILES(3, 1); break;
      case 2: TILES(2, 6); TILES(2, 1); break;
      default: TILES(1, 12); TILES(1, 1);
    }
    i += rows;
  }
}

typedef struct {
  int m, n, k, lda, ldb, ldc, blocks; /* blocks of COLS columns in a chunk */
  float alpha, beta;
  const float *a, *b;
  float *c;
} nt_call;

static void nt_chunk(const void *call, int chunk) {
  const nt_call *t = call;
  int first = chunk * t->blocks * COLS, last = first + t->blocks * COLS;
  if (last > t->n) last = t->n;
  for (int j = first; j < last; j += COLS)
    nt_block(t->m, last - j < COLS ? last - j : COLS, t->k, t->alpha, t->a, t->lda,
             t->b + (long)j * t->ldb, t->ldb, t->beta, t->c + j, t->ldc);
}

/* c = alpha * a @ b.T + beta * c, b (n, k): a linear layer. */
static void rows_nt(int m, int n, int k, float alpha, const float *a, int lda, const float *b,
                    int ldb, float beta, float *c, int ldc) {
  if (n < 1) return;
  int blocks = (n + COLS - 1) / COLS, chunks = 1;
  if ((long)n * k > ALONE && pool_threads() > 1) chunks = CHUNKS * pool_threads();
  if (chunks > blocks) chunks = blocks;
  nt_call call = {m, n, k, lda, ldb, ldc, (blocks + chunks - 1) / chunks, alpha, beta, a, b, c};
  pool_run(nt_chunk, &call, (blocks + call.blocks - 1) / call.blocks);
}

/* c = alpha * a @ b + beta * c, b (k, n): attention weights times values. */
static void rows_nn(int m, int n, int k, float alpha, const float *a, int lda, const float *b,
                    int ldb, float beta, float *c, int ldc) {
  for (int i = 0; i < m; i++) {
    const float *x = a + (long)i * lda;
    float *o = c + (long)i * ldc;
    int j = 0;
    for (; j + 64 <= n; j += 64) {
      __m256 s[8];
      for (int t = 0; t < 8; t++) s[t] = _mm256_setzero_ps();
      for (int p = 0; p < k; p++) {
        __m256 v = _mm256_broadcast_ss(x + p);
        const float *r = b + (long)p * ldb + j;
        for (int t = 0; t < 8; t++) s[t] = _mm256_fmadd_ps(v, _mm256_loadu_ps(r + 8 * t), s[t]);
      }
      float sums[64];
      for (int t = 0; t < 8; t++) _mm256_storeu_ps(sums + 8 * t, s[t]);
      for (int t = 0; t < 64; t++) store(o + j + t, alpha, sums[t], beta);
    }
    for (; j < n; j++) {
      float s = 0.0f;
      for (int p = 0; p < k; p++) s = __builtin_fmaf(x[p], b[(long)p * ldb + j], s);
      store(o + j, alpha, s, beta);
    }
  }
}

/* A transposed left operand is copied first, so that it takes the same path as a plain one. */
static float *untransposed(int m, int k, const float *a, int lda) {
  float *copy = malloc(sizeof(float) * (size_t)m * (size_t)k + 1);
  if (!copy) abort();
  for (int p = 0; p < k; p++)
    for (int i = 0; i < m; i++) copy[(long)i * k + p] = a[(long)p * lda + i];
  return copy;
}

static void rows_gemm(int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,
                      const float *b, int ldb, float beta, float *c, int ldc) {
  float *copy = ta == NO_TRANS ? NULL : untransposed(m, k, a, lda);
  const float *left = copy ? copy : a;
  int pitch = copy ? k : lda;
  __atomic_fetch_add(&spec_blas_row_calls, 1, __ATOMIC_RELAXED);
  if (tb == NO_TRANS)
    rows_nn(m, n, k, alpha, left, pitch, b, ldb, beta, c, ldc);
  else
    rows_nt(m, n, k, alpha, left, pitch, b, ldb, beta, c, ldc);
  free(copy);
}

void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a,
                 int lda, const float *b, int ldb, float beta, float *c, int ldc) {
  if (order == ROW_MAJOR && by_rows && m <= ROWS_MAX) {
    rows_gemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  pthread_once(&opened, open_openblas);
  if (order == ROW_MAJOR && m == 1) {
    int step = ta == NO_TRANS ? 1 : lda;
    if (tb == NO_TRANS)
      openblas.sgemv(ROW_MAJOR, TRANS, k, n, alpha, b, ldb, a, step, beta, c, 1);
    else
      openblas.sgemv(ROW_MAJOR, NO_TRANS, n, k, alpha, b, ldb, a, step, beta, c, 1);
    return;
  }
  openblas.sgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_dgemm(int order, int ta, int tb, int m, int n, int k, double alpha, const double *a,
                 int lda, const double *b, int ldb, double beta, double *c, int ldc) {
  pthread_once(&opened, open_openblas);
  openblas.dgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(int order, int ta, int tb, int m, int n, int k, const void *alpha, const void *a,
                 int lda, const void *b, int ldb, const void *beta, void *c, int ldc) {
  pthread_once(&opened, open_openblas);
  openblas.cgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
