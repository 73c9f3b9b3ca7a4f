  // y[m][n] = sum_k x[m][k] * w[n][k] for 1 to 8*RT rows m; packed weights are requested once.
  // grid: ceil(N / (8*NT)) threadgroups of S simdgroups. A simdgroup takes every S-th quantisation
  // group of K for 8*NT weight rows; partial sums meet in threadgroup memory in a fixed order.
  // Nothing depends on M, so a row's bits do not depend on its neighbours.
  // x (.., K) T with M rows in all, w (N, K*BITS/32) uint, scales and biases (N, K/GS) ST, y (M, N) T.
  // Bytes moved: N*K*BITS/8 of weights, scales and biases 4x through the cache, x once a threadgroup.
  constexpr int RUN = GS == 32 ? 4 : 8;                  // consecutive values of one run
  constexpr int SLICE = 8 * RUN;                         // inputs of one slice: eight runs
  constexpr int PB = 2 * RUN * BITS / 8;                 // bytes a lane loads of one weight row and slice
  constexpr int PW = (PB + 3) / 4;
  int M = 1;
  for (int i = 0; i < x_ndim - 1; ++i) M *= x_shape[i];
  const int N = w_shape[0], K = x_shape[x_ndim - 1];
  const int lane = int(thread_index_in_simdgroup), sg = int(simdgroup_index_in_threadgroup);
  const int fr = ((lane >> 2) & 4) | ((lane >> 1) & 3);  // fragment row: weight row, or input of a run
  const int fc = ((lane >> 1) & 4) | ((lane & 1) << 1);  // fragment columns fc, fc + 1
  const int n0 = int(threadgroup_position_in_grid.x) * 8 * NT;
  const int groups = K / GS;
  const size_t pitch = size_t(K) * BITS / 8;
  const device uint8_t* wb = (const device uint8_t*)w;
  float acc[NT][RT][2];
  for (int t = 0; t < NT; ++t)
    for (int r = 0; r < RT; ++r) acc[t][r][0] = acc[t][r][1] = 0.0f;

  for (int g = sg; g < groups; g += S) {
    simdgroup_matrix<float, 8, 8> part[NT][RT];
    float sx[RT][2];
    for (int r = 0; r < RT; ++r) {
      sx[r][0] = sx[r][1] = 0.0f;
      for (int t = 0; t < NT; ++t) part[t][r] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (int k = g * GS; k < (g + 1) * GS; k += SLICE) {
      float xv[RT][2][RUN];                              // x[m][k + RUN * fr + s] of two rows
      for (int r = 0; r < RT; ++r)
        for (int e = 0; e < 2; ++e) {
          const device T* xp = x + size_t(min(8 * r + fc + e, M - 1)) * K + k + RUN * fr;
          for (int s = 0; s < RUN; ++s) {
            xv[r][e][s] = float(xp[s]);
            sx[r][e] += xv[r][e][s];
          }
        }
      uint q[NT][PW];
      for (int t = 0; t < NT; ++t) {
        const int n = min(n0 + 8 * t + fr, N - 1);
        load_run<PB>(q[t], wb + size_t(n) * pitch + size_t(k) * BITS / 8 + (fc / 2) * PB);
      }
      for (int s = 0; s < RUN; ++s) {                    // step s multiplies element s of every run
        simdgroup_matrix<float, 8, 8> X[RT];
        for (int r = 0; r < RT; ++r) {
          X[r].thread_elements()[0] = xv[r][0][s];
          X[r].thread_elements()[1] = xv[r][1][s];
        }
        for (int t = 0; t < NT; ++t) {
          simdgroup_matrix<float, 8, 8> W;
          W.thread_elements()[0] = float(code_field<BITS>(q[t], s));
          W.thread_elements()[1] = float(code_field<BITS>(q[t], RUN + s));
          for (int r = 0; r < RT; ++r)
            simdgroup_multiply_accumulate(part[t][r], W, X[r], part[t][r]);
        }
      }
    }
    for (int r = 0; r < RT; ++r)                         // over the lanes that share a fragment column
      for (int e = 0; e < 2; ++e) {
        sx[r][e] += simd_shuffle_xor(sx[r][e], 2);
        sx[r][e] += simd_shuffle_xor(sx[r][e], 4);
        sx[r][e] += simd_shuffle_xor(sx[r][e], 16);
      }
    for (int t = 0; t < NT; ++t) {
      const size_t i = size_t(min(n0 + 8 * t + fr, N - 1)) * groups + g;
      const float scale = float(scales[i]), bias = float(biases[i]);
      for (int r = 0; r < RT; ++r)
        for (int e = 0; e < 2; ++e)
          acc[t][r][e] = fma(bias, sx[r][e], fma(scale, part[t][r].thread_elements()[e], acc[t][r][e]));
    }
  }

  threadgroup float sums[S * NT * RT * 64];
  for (int t = 0; t < NT; ++t)
    for (int r = 0; r < RT; ++r)
      for (int e = 0; e < 2; ++e)
        sums[((sg * NT + t) * RT + r) * 64 + fr * 8 + fc + e] = acc[t][r][e];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = int(thread_index_in_threadgroup); i < NT * RT * 64; i += S * 32) {
    float v = 0.0f;
    for (int c = 0; c < S; ++c) v += sums[c * NT * RT * 64 + i];
    const int t = i / (RT * 64), r = (i / 64) % RT;
    const int n = n0 + 8 * t + (i % 64) / 8, m = 8 * r + i % 8;
    if (m < M && n < N) y[size_t(m) * N + n] = T(v);
  }
