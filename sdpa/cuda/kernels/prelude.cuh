// What kernels and traced expressions take for granted: types that convert to float, and functions by the names that they have in MSL.

// The same bits as another type.
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

// A whole number from -2^22 to 2^22 - 1 as a float, exactly: the last digits of a float next to 1.5 * 2^23 count whole numbers.
inline float float_of_small(int x) {
    return __int_as_float(0x4b400000 + x) - 12582912.0f;
}

// The same of one that is so much more than another of these, which many have in common: they become floats once, and an addition is left for each.
inline float float_from(int x, int more) {
    return more == 0 ? float_of_small(x) : float_of_small(x - more) + float(more);
}

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

// Before a loop over scores in which traces are computed.
#if TRACE_UNROLL == 0
#define UNROLL_TRACES _Pragma("unroll")
#else
#define UNROLL_TRACES _Pragma("unroll TRACE_UNROLL")
#endif

// A number that is the same in the whole warp, told to the compiler: it is kept once, not in every thread.
inline int warp_uniform(int x) {
    return __shfl_sync(~0u, x, 0);
}
