  // Second pass: merges the chunks of one row. grid: (R, B*HK) blocks of (D, WAYS) threads; way w adds
  // chunks w, w+WAYS, .. in ascending order, then the ways add up in order. A chunk that lies wholly
  // after the row's last key has mass 0 and adds exact zeros, so the length of the cache leaves no trace.
  // dims[0] = QL, dims[1] = HK. y (B, QL, HQ, D): the layout that the output projection reads.
  __shared__ float nums[WAYS][D], dens[WAYS];
  const int chunks = o_shape[1], R = o_shape[2], row = blockIdx.x, bh = blockIdx.y;
  const int d = threadIdx.x, way = threadIdx.y;
  const long long first = (long long)bh * chunks * R + row;
  float top = -1.0e30f;
  for (int c = d & 31; c < chunks; c += 32) top = fmaxf(top, o_top[first + (long long)c * R]);
#pragma unroll
  for (int lane = 16; lane; lane /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lane));
  float num = 0.0f, den = 0.0f;
#pragma unroll 4
  for (int c = way; c < chunks; c += WAYS) {
    const long long i = first + (long long)c * R;
    const float weight = exp2f(o_top[i] - top);
    den = fmaf(weight, o_mass[i], den);
    num = fmaf(weight, o[i * D + d], num);
  }
  nums[way][d] = num;
  if (d == 0) dens[way] = den;
  __syncthreads();
  if (way != 0) return;
#pragma unroll
  for (int w = 1; w < WAYS; ++w) num += nums[w][d], den += dens[w];
  const int QL = dims[0], HK = dims[1], G = R / QL, b = bh / HK;
  const int head = (bh % HK) * G + row / QL, i = row % QL;
  y[(((long long)b * QL + i) * HK * G + head) * D + d] = static_cast<T>(num / den);
