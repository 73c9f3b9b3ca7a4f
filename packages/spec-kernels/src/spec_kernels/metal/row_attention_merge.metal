  // Second pass: merges the chunks of one row in ascending order. grid: (D, R, B*HK) threads. A chunk
  // that lies wholly after the row's last key has mass 0 and adds exact zeros.
  // dims[0] = QL, dims[1] = HK. y (B, QL, HQ, D): the layout that the output projection reads.
  const int d = int(thread_position_in_grid.x), row = int(thread_position_in_grid.y);
  const int bh = int(thread_position_in_grid.z), chunks = o_shape[1], RP = o_shape[2], D = o_shape[3];
  const int R = int(threads_per_grid.y);
  const size_t first = size_t(bh) * chunks * RP + row;
  float top = -1.0e30f, num = 0.0f, den = 0.0f;
  for (int c = 0; c < chunks; ++c) top = max(top, o_top[first + size_t(c) * RP]);
  for (int c = 0; c < chunks; ++c) {
    const size_t i = first + size_t(c) * RP;
    const float weight = fast::exp2(o_top[i] - top);
    den = fma(weight, o_mass[i], den);
    num = fma(weight, o[i * D + d], num);
  }
  const int QL = dims[0], HK = dims[1], G = R / QL, b = bh / HK;
  const int head = (bh % HK) * G + row / QL, i = row % QL;
  y[((size_t(b) * QL + i) * HK * G + head) * D + d] = T(num / den);
