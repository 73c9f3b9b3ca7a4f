  // First pass: one threadgroup attends 8*NSG rows of one KV head to one chunk of the keys.
  // grid: (HK, chunks * row groups, B) threadgroups of NSG simdgroups, one 8-row tile each. A chunk is a
  // fixed range of positions (NEAR keys below position SHIFT, FAR above), whatever the length of the
  // cache, so a row's arithmetic depends on its own query, its last key and absolute positions only.
  // K and V of 16 keys at a time go through threadgroup memory: each element is fetched once.
  // Rows of a KV head are ordered (head in group, position): row = h * QL + i.
  // q (B, HK, RP, D) padded rows, k and v (B, HK, L, D): any strides, last axis dense. shape_of[0] = QL,
  // shape_of[1] = number of row groups. Out: o (B*HK, C, RP, D) unnormalised, o_top, o_mass (B*HK, C, RP).
  constexpr int BK = 16, LD = D + 8, DT = D / 8;
  const int HK = k_shape[1], L = k_shape[2], RP = q_shape[2], QL = shape_of[0], GROUPS = shape_of[1];
  const int hk = int(threadgroup_position_in_grid.x), b = int(threadgroup_position_in_grid.z);
  const int chunk = int(threadgroup_position_in_grid.y) / GROUPS;
  const int chunks = int(threadgroups_per_grid.y) / GROUPS;
  const int r0 = (int(threadgroup_position_in_grid.y) % GROUPS) * NSG * 8;
  const int lane = int(thread_index_in_simdgroup), sg = int(simdgroup_index_in_threadgroup);
  const int fr = ((lane >> 2) & 4) | ((lane >> 1) & 3), fc = ((lane >> 1) & 4) | ((lane & 1) << 1);
  threadgroup T kt[BK * LD];
  threadgroup T vt[BK * LD];
  const device T* kp = k + size_t(b) * k_strides[0] + size_t(hk) * k_strides[1];
  const device T* vp = v + size_t(b) * v_strides[0] + size_t(hk) * v_strides[1];
  const int row = r0 + sg * 8 + fr;
  const int last = CAUSAL ? L - QL + (row % QL) : L - 1;  // last key this row may see
  simdgroup_matrix<T, 8, 8> q8[DT];
  simdgroup_matrix<float, 8, 8> o8[DT];
  const device T* qp = q + (size_t(b * HK + hk) * RP + r0 + sg * 8) * D;
  for (int i = 0; i < DT; ++i) {
    simdgroup_load(q8[i], qp + 8 * i, D);
    o8[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  float top = -1.0e30f, mass = 0.0f;
  const int start = chunk < SHIFT / NEAR ? chunk * NEAR : SHIFT + (chunk - SHIFT / NEAR) * FAR;
  const int end = min(L, start + (start < SHIFT ? NEAR : FAR));
  for (int first = start; first < end; first += BK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int e = int(thread_index_in_threadgroup); e < BK * D / 4; e += NSG * 32) {
      const int r = (4 * e) / D, c = (4 * e) % D;
      vec<T, 4> a = vec<T, 4>(T(0)), w = vec<T, 4>(T(0));
      if (first + r < end) {
        a = *(const device vec<T, 4>*)(kp + size_t(first + r) * k_strides[2] + c);
        w = *(const device vec<T, 4>*)(vp + size_t(first + r) * v_strides[2] + c);
      }
      *(threadgroup vec<T, 4>*)(kt + r * LD + c) = a;
      *(threadgroup vec<T, 4>*)(vt + r * LD + c) = w;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_matrix<float, 8, 8> s8[BK / 8];
    for (int j = 0; j < BK / 8; ++j) {
      s8[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      for (int i = 0; i < DT; ++i) {
        simdgroup_matrix<T, 8, 8> kf;
        simdgroup_load(kf, kt + 8 * j * LD + 8 * i, LD, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(s8[j], q8[i], kf, s8[j]);
      }
    }
    float high = -1.0e30f;
    for (int j = 0; j < BK / 8; ++j)
      for (int e = 0; e < 2; ++e) {
        const int key = first + 8 * j + fc + e;
        const float score = s8[j].thread_elements()[e] * (scale[0] * 1.44269504f);
        s8[j].thread_elements()[e] = key <= last && key < end ? score : -INFINITY;
        high = max(high, s8[j].thread_elements()[e]);
      }
    high = max(high, simd_shuffle_xor(high, 1));           // the four lanes that share a fragment row
    high = max(high, simd_shuffle_xor(high, 8));
    const float next = max(top, high), factor = fast::exp2(top - next);
    float sum = 0.0f;
    simdgroup_matrix<T, 8, 8> p8[BK / 8];
    for (int j = 0; j < BK / 8; ++j)
      for (int e = 0; e < 2; ++e) {
        const float p = fast::exp2(s8[j].thread_elements()[e] - next);
        sum += p;
        p8[j].thread_elements()[e] = T(p);
      }
    sum += simd_shuffle_xor(sum, 1);
    sum += simd_shuffle_xor(sum, 8);
    mass = fma(mass, factor, sum);
    top = next;
    for (int i = 0; i < DT; ++i) {
      o8[i].thread_elements()[0] *= factor;
      o8[i].thread_elements()[1] *= factor;
      for (int j = 0; j < BK / 8; ++j) {
        simdgroup_matrix<T, 8, 8> vf;
        simdgroup_load(vf, vt + 8 * j * LD + 8 * i, LD);
        simdgroup_multiply_accumulate(o8[i], p8[j], vf, o8[i]);
      }
    }
  }
  const size_t base = (size_t(b * HK + hk) * chunks + chunk) * RP + r0 + sg * 8;
  for (int i = 0; i < DT; ++i) simdgroup_store(o8[i], o + base * D + 8 * i, D);
  if (fc == 0) {
    o_top[base + fr] = top;
    o_mass[base + fr] = mass;
  }
