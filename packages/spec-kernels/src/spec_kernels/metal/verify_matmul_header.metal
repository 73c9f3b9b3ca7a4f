// Field f of a little-endian stream of BITS-wide codes.
template <int BITS> inline uint code_field(thread const uint* w, int f) {
  const int p = f * BITS, i = p / 32, o = p % 32;
  uint v = w[i] >> o;
  if (o + BITS > 32) v |= w[i + 1] << (32 - o);
  return v & ((1u << BITS) - 1u);
}

// PB contiguous bytes into words, with the widest loads their alignment allows.
template <int PB> inline void load_run(thread uint* q, const device uint8_t* p) {
  if (PB % 4 == 0) {
    for (int i = 0; i < PB / 4; ++i) q[i] = ((const device uint*)p)[i];
    return;
  }
  for (int i = 0; i < (PB + 3) / 4; ++i) q[i] = 0u;
  if (PB % 2 == 0) {
    for (int i = 0; i < PB / 2; ++i) q[i / 2] |= uint(((const device ushort*)p)[i]) << (16 * (i & 1));
  } else {
    for (int i = 0; i < PB; ++i) q[i / 4] |= uint(p[i]) << (8 * (i & 3));
  }
}
