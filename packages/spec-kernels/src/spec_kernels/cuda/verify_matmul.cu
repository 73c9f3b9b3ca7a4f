  // y[m][n] = sum_k x[m][k] * w[n][k], weights read once for each 8*RT rows m.
  // grid: (ceil(N / (16*NT)), ceil(M / (8*RT))) blocks of S warps. A block owns 16*NT weight rows and
  // 8*RT rows m; warp s takes the slabs s, s+S, .. of K (GPS groups of GS values each); the partial
  // sums meet in shared memory in a fixed order. Nothing depends on M, so a row's bits do not depend
  // on its neighbours.
  // x (.., K) T with M rows in all, w (N, K*BITS/32) uint32 (BITS 16: (N, K) T), scales and biases
  // (N, K/GS) ST, y (M, N) T. The lines before these choose one weight among siblings that share x:
  // they define w, scales, biases, y, its N, and `tile`, the block's number within that weight.
  using TC = Tensor<T>;
  constexpr int RUN = GS / 4;                 // values of a group that one lane owns
  constexpr int WB = RUN * BITS / 8;          // their bytes
  constexpr int QW = (WB + 3) / 4;            // and words
  constexpr int SB = GPS * sizeof(ST);
  constexpr int SW = (SB + 3) / 4;
  constexpr int PITCH = RT * 8 + 1;
  __shared__ float sums[S * NT * 16 * PITCH];
  int M = 1;
  for (int i = 0; i < x_ndim - 1; ++i) M *= x_shape[i];
  const int K = x_shape[x_ndim - 1];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int n0 = tile * 16 * NT, m0 = blockIdx.y * 8 * RT;
  const int groups = K / GS, slabs = groups / GPS;
  const long long pitch = (long long)K * BITS / 8;
  const unsigned char* wb = reinterpret_cast<const unsigned char*>(w);
  float acc[NT][RT][4];
#pragma unroll
  for (int a = 0; a < NT; ++a)
#pragma unroll
    for (int r = 0; r < RT; ++r)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[a][r][e] = 0.0f;

  for (int slab = warp; slab < slabs; slab += S) {
    unsigned q[GPS][NT][2][QW];
    unsigned sc[NT][2][SW], bi[NT][2][SW];
#pragma unroll
    for (int a = 0; a < NT; ++a)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int n = min(n0 + 16 * a + 8 * h + g, N - 1);
        const unsigned char* row = wb + n * pitch + (long long)slab * GPS * GS * BITS / 8 + t * WB;
#pragma unroll
        for (int j = 0; j < GPS; ++j) load_weights<WB>(q[j][a][h], row + j * (GS * BITS / 8));
        if constexpr (BITS != 16) {
          load_cached<SB>(sc[a][h], scales + (long long)n * groups + slab * GPS);
          load_cached<SB>(bi[a][h], biases + (long long)n * groups + slab * GPS);
        }
      }
#pragma unroll
    for (int j = 0; j < GPS; ++j) {
      unsigned xv[RT][RUN / 2];
#pragma unroll
      for (int r = 0; r < RT; ++r) {
        const int m = min(m0 + 8 * r + g, M - 1);
        load_cached<RUN * 2>(xv[r], x + (long long)m * K + (slab * GPS + j) * GS + t * RUN);
      }
      float part[NT][RT][4], total[RT][4];
#pragma unroll
      for (int r = 0; r < RT; ++r)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          total[r][e] = 0.0f;
#pragma unroll
          for (int a = 0; a < NT; ++a) part[a][r][e] = 0.0f;
        }
#pragma unroll
      for (int s = 0; s < RUN / 4; ++s) {
        const unsigned ones[4] = {TC::ONES, TC::ONES, TC::ONES, TC::ONES};
        unsigned b0[RT], b1[RT];
#pragma unroll
        for (int r = 0; r < RT; ++r) {
          input_pairs<BITS>(xv[r], s, b0[r], b1[r]);
          if constexpr (BITS != 16) TC::mma(total[r], ones, b0[r], b1[r]);
        }
#pragma unroll
        for (int a = 0; a < NT; ++a) {
          unsigned frag[4];
          weight_pairs<T, BITS>(q[j][a][0], s, frag[0], frag[2]);
          weight_pairs<T, BITS>(q[j][a][1], s, frag[1], frag[3]);
#pragma unroll
          for (int r = 0; r < RT; ++r)
            TC::mma(BITS == 16 ? acc[a][r] : part[a][r], frag, b0[r], b1[r]);
        }
      }
      if constexpr (BITS != 16) {
        constexpr float OFFSET = BITS == 8 ? 0.0f : TC::OFFSET;
#pragma unroll
        for (int a = 0; a < NT; ++a)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float scale = unpack_scale<ST>(sc[a][h], j);
            const float bias = fmaf(-OFFSET, scale, unpack_scale<ST>(bi[a][h], j));
#pragma unroll
            for (int r = 0; r < RT; ++r)
#pragma unroll
              for (int e = 0; e < 2; ++e)
                acc[a][r][2 * h + e] = fmaf(bias, total[r][e],
                                            fmaf(scale, part[a][r][2 * h + e], acc[a][r][2 * h + e]));
          }
      }
    }
  }

#pragma unroll
  for (int a = 0; a < NT; ++a)
#pragma unroll
    for (int r = 0; r < RT; ++r)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int n = 16 * a + 8 * (e / 2) + g, m = 8 * r + 2 * t + (e & 1);
        sums[(warp * NT * 16 + n) * PITCH + m] = acc[a][r][e];
      }
  __syncthreads();
  for (int i = threadIdx.x; i < NT * 16 * RT * 8; i += S * 32) {
    const int n = i % (NT * 16), m = i / (NT * 16);
    float v = 0.0f;
#pragma unroll
    for (int s = 0; s < S; ++s) v += sums[(s * NT * 16 + n) * PITCH + m];
    if (m0 + m < M && n0 + n < N) y[(long long)(m0 + m) * N + n0 + n] = static_cast<T>(v);
  }
