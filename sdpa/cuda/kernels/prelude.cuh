// Element types, bit casts and helpers that the kernels and the traced score_mods and masks use. Names are those of MSL, so that CUDA and MSL share
// generated code.

// Bit cast.
template <class To>
inline To as_type(uint x);
template <>
inline float as_type<float>(uint x) { return __uint_as_float(x); }
template <>
inline int as_type<int>(uint x) { return int(x); }
template <class To>
inline To as_type(int x);
template <>
inline uint as_type<uint>(int x) { return uint(x); }
template <class To>
inline To as_type(float x);
template <>
inline uint as_type<uint>(float x) { return __float_as_uint(x); }

// Converts an integer in [-2^22, 2^22) to float exactly, without a conversion instruction. It adds x to the bits of 1.5 * 2^23, whose last bit has the
// value 1, and then subtracts 1.5 * 2^23.
inline float float_of_small(int x) {
    return __int_as_float(0x4b400000 + x) - 12582912.0f;
}

// Returns float(x), where x is a base that many scores of a thread share, plus `more`, the constant offset of this score. The compiler converts the base
// `x - more` once, so each score costs one addition.
inline float float_from(int x, int more) {
    return more == 0 ? float_of_small(x) : float_of_small(x - more) + float(more);
}

// Rounds toward zero, saturates, and gives 0 for NaN: what one conversion instruction does. Branches for these cases in each score would take ptxas minutes.
#define TO_WHOLE
inline int to_whole(float x) { return __float2int_rz(x); }

struct Half {
    unsigned short bits;
    inline operator float() const { return cvt_f32_f16(bits); }
};

struct BFloat {
    unsigned short bits;
    inline operator float() const { return __uint_as_float(uint(bits) << 16); }
};

inline uint pack_pair(Half, float low, float high) { return cvt_rn_f16x2(low, high); }
inline uint pack_pair(BFloat, float low, float high) { return cvt_rn_bf16x2(low, high); }

// UNROLL_TRACES goes before each loop over scores that evaluates a trace. Loops over long traces are unrolled for TRACE_UNROLL scores only: unrolling
// them for all takes minutes to compile and overflows the instruction cache.
#if TRACE_UNROLL == 0
#define UNROLL_TRACES _Pragma("unroll")
#else
#define UNROLL_TRACES _Pragma("unroll TRACE_UNROLL")
#endif

// Broadcasts lane 0, so that the compiler knows the value to be uniform in the warp and keeps it in a uniform register.
inline int warp_uniform(int x) {
    return __shfl_sync(~0u, x, 0);
}
