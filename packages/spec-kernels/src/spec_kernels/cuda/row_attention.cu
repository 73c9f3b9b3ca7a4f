  // First pass: one block attends 16*RT rows of one KV head to one chunk of the keys.
  // grid: (chunks, HK * row groups, B) blocks of RT*4 warps. A chunk is a fixed range of positions:
  // NEAR keys each below position SHIFT, FAR keys each above, whatever the length of the cache. K and V
  // of 128 keys at a time go through shared memory, so each element is fetched once a block.
  // Warp (tile, quarter) scores 16 rows against 32 keys, then owns D/4 columns of the output.
  // A row's arithmetic depends on its own query, its last key and absolute positions only.
  // k and v may have room for more than the n_keys[b] they hold; a chunk behind those has mass 0.
  // FRESH: the newest QL keys are not in k and v yet but in k_new and v_new (B, HK, QL, D).
  // Rows of a KV head are ordered (head in group, position): row = h * QL + i.
  // q (B, HQ, QL, D), k and v (B, HK, L, D): any strides, last axis dense. Out: o (B*HK, C, R, D)
  // unnormalised, o_top (running maximum, exp2 domain) and o_mass (B*HK, C, R).
  constexpr int KEYS = 128, PITCH = D + 8, PP = KEYS + 8, DT = D / 16, DW = D / 32;
  extern __shared__ __align__(16) unsigned char raw[];
  T* ks = reinterpret_cast<T*>(raw);
  T* vs = ks + KEYS * PITCH;
  T* ps = vs + KEYS * PITCH;                             // probabilities, 16*RT rows of PP
  __shared__ float tops[4][RT * 16], masses[4][RT * 16];
  const int HQ = q_shape[1], QL = q_shape[2], HK = k_shape[1], b = blockIdx.z, L = n_keys[b];
  const int G = HQ / HK, R = G * QL;
  const int chunk = blockIdx.x, chunks = gridDim.x;
  const int hk = blockIdx.y % HK, r0 = (blockIdx.y / HK) * RT * 16;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int tile = warp / 4, quarter = warp % 4;
  const int start = chunk < SHIFT / NEAR ? chunk * NEAR : SHIFT + (chunk - SHIFT / NEAR) * FAR;
  const int end = min(L, start + (start < SHIFT ? NEAR : FAR));
  const T* kp = k + b * k_strides[0] + hk * k_strides[1];
  const T* vp = v + b * v_strides[0] + hk * v_strides[1];
  const T* kn = k_new + b * k_new_strides[0] + hk * k_new_strides[1];
  const T* vn = v_new + b * v_new_strides[0] + hk * v_new_strides[1];
  const int held = L - QL;
  auto fetch = [&](T* to, const T* from, long long stride, const T* fresh, long long pace, int first) {
    for (int i = threadIdx.x; i < KEYS * D / 8; i += RT * 128) {
      const int row = i / (D / 8), col = 8 * (i % (D / 8)), key = min(first + row, end - 1);
      const T* at = FRESH && key >= held ? fresh + (key - held) * pace : from + key * stride;
      copy_async(to + row * PITCH + col, at + col, first + row < end);
    }
    commit_copies();
  };
  auto fetch_keys = [&](int first) { fetch(ks, kp, k_strides[2], kn, k_new_strides[2], first); };
  auto fetch_values = [&](int first) { fetch(vs, vp, v_strides[2], vn, v_new_strides[2], first); };
  if (start < end) {
    fetch_keys(start);
    fetch_values(start);
  }

  unsigned qf[DT][4];
  int last[2];                                           // last key each of the lane's rows may see
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = min(r0 + tile * 16 + 8 * h + g, R - 1), i = row % QL;
    last[h] = CAUSAL ? L - QL + i : L - 1;
    const T* qp = q + b * q_strides[0] + (hk * G + row / QL) * q_strides[1] + i * q_strides[2];
#pragma unroll
    for (int s = 0; s < DT; ++s) {
      qf[s][h] = *reinterpret_cast<const unsigned*>(qp + 16 * s + 2 * t);
      qf[s][2 + h] = *reinterpret_cast<const unsigned*>(qp + 16 * s + 8 + 2 * t);
    }
  }
  const float scale2 = scale[0] * 1.44269504088896340736f;
  float top[2] = {-1.0e30f, -1.0e30f}, mass[2] = {0.0f, 0.0f}, out[DW][4];
#pragma unroll
  for (int j = 0; j < DW; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) out[j][e] = 0.0f;

  for (int first = start; first < end; first += KEYS) {
    wait_copies<1>();
    __syncthreads();                                     // K is here
    float score[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) score[j][e] = 0.0f;
#pragma unroll
    for (int s = 0; s < DT; ++s)
#pragma unroll
      for (int j = 0; j < 4; j += 2) {                   // two tiles of eight keys a load
        unsigned f[4];
        const int key = quarter * 32 + 8 * j + (lane & 7) + 8 * (lane >> 4);
        load_matrices(f, ks + key * PITCH + 16 * s + 8 * ((lane >> 3) & 1));
        Tile<T>::mma(score[j], qf[s], f[0], f[1]);
        Tile<T>::mma(score[j + 1], qf[s], f[2], f[3]);
      }
    float high[2] = {-1.0e30f, -1.0e30f};
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = first + quarter * 32 + 8 * j + 2 * t + (e & 1);
        const bool seen = key <= last[e / 2] && key < end;
        score[j][e] = seen ? score[j][e] * scale2 : __uint_as_float(0xff800000u);
        high[e / 2] = fmaxf(high[e / 2], score[j][e]);
      }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      high[h] = fmaxf(high[h], __shfl_xor_sync(0xffffffffu, high[h], 1));
      high[h] = fmaxf(high[h], __shfl_xor_sync(0xffffffffu, high[h], 2));
      if (t == 0) tops[quarter][tile * 16 + 8 * h + g] = high[h];
    }
    __syncthreads();                                     // every warp is done with K
    const bool more = first + KEYS < end;
    if (more) fetch_keys(first + KEYS);
    float factor[2], sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile * 16 + 8 * h + g;
      const float now = fmaxf(fmaxf(tops[0][row], tops[1][row]), fmaxf(tops[2][row], tops[3][row]));
      const float next = fmaxf(top[h], now);
      factor[h] = exp2f(top[h] - next);
      top[h] = next;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float p0 = exp2f(score[j][2 * h] - top[h]), p1 = exp2f(score[j][2 * h + 1] - top[h]);
        sum[h] += p0 + p1;
        const int row = tile * 16 + 8 * h + g, key = quarter * 32 + 8 * j + 2 * t;
        *reinterpret_cast<unsigned*>(ps + row * PP + key) = Tile<T>::pack(p0, p1);
      }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
      if (t == 0) masses[quarter][tile * 16 + 8 * h + g] = sum[h];
    }
    if (more) wait_copies<1>(); else wait_copies<0>();
    __syncthreads();                                     // V and the probabilities are here
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile * 16 + 8 * h + g;
      const float here = (masses[0][row] + masses[1][row]) + (masses[2][row] + masses[3][row]);
      mass[h] = fmaf(mass[h], factor[h], here);
    }
#pragma unroll
    for (int j = 0; j < DW; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[j][e] *= factor[e / 2];
#pragma unroll
    for (int s = 0; s < KEYS / 16; ++s) {                // sixteen keys a step
      unsigned p[4];
      load_matrices(p, ps + (tile * 16 + (lane & 15)) * PP + 16 * s + 8 * (lane >> 4));
#pragma unroll
      for (int j = 0; j < DW; ++j) {
        unsigned f[2];
        load_two_transposed(f, vs + (16 * s + (lane & 15)) * PITCH + quarter * (D / 4) + 8 * j);
        Tile<T>::mma(out[j], p, f[0], f[1]);
      }
    }
    __syncthreads();                                     // every warp is done with V
    if (more) fetch_values(first + KEYS);
  }

  const long long base = ((long long)(b * HK + hk) * chunks + chunk) * R;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = r0 + tile * 16 + 8 * h + g;
    if (row >= R) continue;
#pragma unroll
    for (int j = 0; j < DW; ++j) {
      const float2 pair = make_float2(out[j][2 * h], out[j][2 * h + 1]);
      *reinterpret_cast<float2*>(o + (base + row) * D + quarter * (D / 4) + 8 * j + 2 * t) = pair;
    }
    if (t == 0 && quarter == 0) {
      o_top[base + row] = top[h];
      o_mass[base + row] = mass[h];
    }
  }
