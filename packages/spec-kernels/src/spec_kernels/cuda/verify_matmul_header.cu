// Fragment helpers for the few-row matmul. mma.m16n8k16: a lane g*4+t holds weight rows g and g+8
// and input row g; which four of the sixteen k values it holds is free as long as both sides agree.
template <typename T> struct Tensor;

template <> struct Tensor<__nv_bfloat16> {
  static constexpr unsigned ONES = 0x3f803f80u;   // {1, 1}
  // A code below 128 fits the mantissa of 128 + code; the 128 leaves with the bias.
  static __device__ unsigned codes(unsigned pair) { return pair | 0x43004300u; }
  static constexpr float OFFSET = 128.0f;
  static __device__ void mma(float* c, const unsigned* a, unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  // Bytes 2*half and 2*half+1 of `word`: an eight-bit code needs the detour through float.
  static __device__ unsigned bytes(unsigned word, int half) {
    const unsigned lo = __byte_perm(word, 0x4b000000u, half ? 0x7652u : 0x7650u);
    const unsigned hi = __byte_perm(word, 0x4b000000u, half ? 0x7653u : 0x7651u);
    const float a = __uint_as_float(lo) - 8388608.0f, b = __uint_as_float(hi) - 8388608.0f;
    return __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632u);
  }
};

template <> struct Tensor<__half> {
  static constexpr unsigned ONES = 0x3c003c00u;
  // 1024 + code, less 1024: left in, the offset would drown a two-bit code among outliers.
  static __device__ unsigned codes(unsigned pair) { return centred(pair | 0x64006400u); }
  static __device__ unsigned centred(unsigned pair) {
    const unsigned offset = 0x64006400u;
    const __half2 v = __hsub2(reinterpret_cast<const __half2&>(pair),
                              reinterpret_cast<const __half2&>(offset));
    return reinterpret_cast<const unsigned&>(v);
  }
  static constexpr float OFFSET = 0.0f;
  static __device__ void mma(float* c, const unsigned* a, unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  static __device__ unsigned bytes(unsigned word, int half) {
    return centred(__byte_perm(word, 0x64646464u, half ? 0x4342u : 0x4140u));
  }
};

// BYTES contiguous bytes into 32-bit words with the widest loads the alignment allows. Weights are
// read once, so they bypass L1, which belongs to the input rows.
template <int BYTES> __device__ void load_weights(unsigned* out, const unsigned char* p) {
  if constexpr (BYTES % 16 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i)
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(out[4 * i]), "=r"(out[4 * i + 1]), "=r"(out[4 * i + 2]), "=r"(out[4 * i + 3])
                   : "l"(p + 16 * i));
  } else if constexpr (BYTES % 8 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 8; ++i)
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];"
                   : "=r"(out[2 * i]), "=r"(out[2 * i + 1])
                   : "l"(p + 8 * i));
  } else if constexpr (BYTES % 4 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) out[i] = __ldg((const unsigned*)p + i);
  } else {
    constexpr int STEP = BYTES % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < (BYTES + 3) / 4; ++i) out[i] = 0u;
#pragma unroll
    for (int i = 0; i < BYTES; i += STEP) {
      const unsigned v = STEP == 2 ? *(const unsigned short*)(p + i) : p[i];
      out[i / 4] |= v << (8 * (i & 3));
    }
  }
}

template <int BYTES> __device__ void load_cached(unsigned* out, const void* p) {
  if constexpr (BYTES % 16 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i) {
      const uint4 v = __ldg((const uint4*)p + i);
      out[4 * i] = v.x, out[4 * i + 1] = v.y, out[4 * i + 2] = v.z, out[4 * i + 3] = v.w;
    }
  } else if constexpr (BYTES % 8 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 8; ++i) {
      const uint2 v = __ldg((const uint2*)p + i);
      out[2 * i] = v.x, out[2 * i + 1] = v.y;
    }
  } else if constexpr (BYTES % 4 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) out[i] = __ldg((const unsigned*)p + i);
  } else {
#pragma unroll
    for (int i = 0; i < (BYTES + 3) / 4; ++i) out[i] = 0u;
#pragma unroll
    for (int i = 0; i < BYTES / 2; ++i)
      out[i / 2] |= (unsigned)__ldg((const unsigned short*)p + i) << (16 * (i & 1));
  }
}

// Value i of scales or biases held as raw words.
template <typename S> __device__ float unpack_scale(const unsigned* words, int i) {
  if constexpr (sizeof(S) == 4) {
    return __uint_as_float(words[i]);
  } else {
    const unsigned short bits = (unsigned short)(words[i / 2] >> (16 * (i & 1)));
    return static_cast<float>(*reinterpret_cast<const S*>(&bits));
  }
}

// Field f of a little-endian stream of BITS-wide codes.
template <int BITS> __device__ unsigned code_field(const unsigned* w, int f) {
  const int p = f * BITS, i = p / 32, o = p % 32;
  unsigned v = w[i] >> o;
  if (o + BITS > 32) v |= w[i + 1] << (32 - o);
  return v & ((1u << BITS) - 1u);
}

// The four values of k step `s` of one weight row, as two registers of two 16-bit numbers.
template <typename T, int BITS>
__device__ void weight_pairs(const unsigned* q, int s, unsigned& first, unsigned& second) {
  if constexpr (BITS == 16) {
    first = q[2 * s], second = q[2 * s + 1];
  } else if constexpr (BITS == 8) {
    first = Tensor<T>::bytes(q[s], 0), second = Tensor<T>::bytes(q[s], 1);
  } else if constexpr (BITS == 4) {  // codes (0,4) (1,5), then (2,6) (3,7) of a word
    const unsigned w = q[s / 2] >> (8 * (s & 1));
    first = Tensor<T>::codes(w & 0x000f000fu);
    second = Tensor<T>::codes((w >> 4) & 0x000f000fu);
  } else {
    const int f = 4 * s;
    first = Tensor<T>::codes(code_field<BITS>(q, f) | (code_field<BITS>(q, f + 1) << 16));
    second = Tensor<T>::codes(code_field<BITS>(q, f + 2) | (code_field<BITS>(q, f + 3) << 16));
  }
}

// The input values that meet weight_pairs() in k step `s`.
template <int BITS>
__device__ void input_pairs(const unsigned* x, int s, unsigned& first, unsigned& second) {
  if constexpr (BITS == 4) {
    const unsigned lo = x[4 * (s / 2) + (s & 1)], hi = x[4 * (s / 2) + (s & 1) + 2];
    first = __byte_perm(lo, hi, 0x5410), second = __byte_perm(lo, hi, 0x7632);
  } else {
    first = x[2 * s], second = x[2 * s + 1];
  }
}
