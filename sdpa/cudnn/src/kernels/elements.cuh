// Converts elements of f32, f16 and bf16 to floats and back.

typedef long long number;

union Bits {
    float value;
    unsigned bits;
};

static __device__ float of_bits(unsigned bits) {
    Bits it;
    it.bits = bits;
    return it.value;
}

static __device__ unsigned to_bits(float value) {
    Bits it;
    it.value = value;
    return it.bits;
}

static __device__ float none() { return of_bits(0xff800000u); }

static __device__ float from_f16(unsigned short x) {
    unsigned sign = (x & 0x8000u) << 16, exponent = x >> 10 & 31u, rest = x & 0x3ffu;
    if (exponent == 31) return of_bits(sign | 0x7f800000u | rest << 13);
    if (exponent == 0) return of_bits(sign | to_bits((float)rest * of_bits(0x33800000u)));
    return of_bits(sign | (exponent + 112) << 23 | rest << 13);
}

static __device__ unsigned short to_f16(float value) {
    unsigned bits = to_bits(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return (unsigned short)(sign | 0x7e00u);
    if (size >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);
    // The result is subnormal: adding 0.5 rounds to a multiple of 2^-24, the spacing of subnormal f16.
    if (size < 0x38800000u) return (unsigned short)(sign | (to_bits(of_bits(size) + 0.5f) - 0x3f000000u));
    return (unsigned short)(sign | (size + 0xfffu + (size >> 13 & 1u) - 0x38000000u) >> 13);
}

static __device__ unsigned short to_bf16(float value) {
    unsigned bits = to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (unsigned short)(bits >> 16 | 0x40u);
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Element types (`type`): 0 is f32, 1 is f16, 2 is bf16.
static __device__ float load(const char *from, number type, number at) {
    if (type == 0) return ((const float *)from)[at];
    unsigned short bits = ((const unsigned short *)from)[at];
    return type == 1 ? from_f16(bits) : of_bits((unsigned)bits << 16);
}

static __device__ void store(char *to, number type, number at, float value) {
    if (type == 0) ((float *)to)[at] = value;
    else ((unsigned short *)to)[at] = type == 1 ? to_f16(value) : to_bf16(value);
}
