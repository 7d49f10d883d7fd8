// Functions that traced score_mods and masks call, with the names that they have in MSL (sdpa/emit). Compiled in only if there is a trace.

#define ERROR_FUNCTION
inline float error_function(float x) {
    return erff(x);
}

// The CUDA library's functions: for f32 problems and for values that a comparison depends on. `sin_within` and `cos_within` get arguments of at most
// 2^24 or that depend on the score; `pow_within` gets exponents of at most 64, `pow_of` a positive constant base and its base-2 logarithm.
namespace exact {
inline float sqrt(float x) { return sqrtf(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float exp(float x) { return expf(x); }
inline float log(float x) { return logf(x); }
inline float sin(float x) { return sinf(x); }
inline float cos(float x) { return cosf(x); }
inline float sin_within(float x) { return sinf(x); }
inline float cos_within(float x) { return cosf(x); }
inline float tanh(float x) { return tanhf(x); }
inline float pow(float x, float y) { return powf(x, y); }
inline float pow_within(float x, float y) { return powf(x, y); }
inline float pow_of(float x, float y, float) { return powf(x, y); }
inline float quotient(float x, float y) { return x / y; }
inline float min(float x, float y) { return fminf(x, y); }
inline float max(float x, float y) { return fmaxf(x, y); }
}

#ifdef EXACT
namespace precise = exact;
#else

// Subtracts whole turns (multiples of 2 pi) from x, for |x| <= 2^24. The result is at most 3.8 in absolute value; its error is less than an ulp of 2.
inline float reduce_range_small(float x) {
    // Adding 1.5 * 2^23 rounds to an integer, which subtracting 1.5 * 2^23 gives back.
    const float turns = fmaf(x, 0.159154943f, 12582912.0f) - 12582912.0f;
    return fmaf(turns, 1.74845553e-7f, fmaf(turns, -6.28318548f, x));
}

// The bits of 1 / (2 pi), from the bit of weight 1/2 on.
__constant__ const uint INVERSE_TWO_PI[6] = {0x28be60db, 0x9391054a, 0x7f09d5f4, 0x7d4d3770, 0x36d8a566, 0x4f10e410};

// Like reduce_range_small, for |x| > 2^24. x is an integer times a power of two. The integer is multiplied by 64 bits of 1 / (2 pi); the bits before
// these contribute only whole turns.
inline float reduce_range_large(float x) {
    const uint bits = __float_as_uint(x);
    const int power = int(bits >> 23 & 255) - 150, word = power >> 5, by = power & 31;
    const uint digits = bits & 0x7fffff | 0x800000;
    const uint first = __funnelshift_l(INVERSE_TWO_PI[word + 1], INVERSE_TWO_PI[word], by);
    const uint second = __funnelshift_l(INVERSE_TWO_PI[word + 2], INVERSE_TWO_PI[word + 1], by);
    const float remainder = float(int(digits * first + __umulhi(digits, second))) * 1.46291808e-9f;
    return (int(bits) < 0 ? -remainder : remainder) + (x - x);
}

inline float reduce_range(float x) {
    return fabsf(x) <= 16777216.0f ? reduce_range_small(x) : reduce_range_large(x);
}

// sin.approx has an absolute error of 5e-7; near 0 the argument itself is a better approximation.
inline float sin_reduced(float angle) {
    return fabsf(angle) < 0.0144f ? angle : sin_approx(angle);
}

// Returns log2(x) with a relative error of 1e-6, also for x close to 1, where large exponents of pow amplify the error.
inline float log2_accurate(float x) {
    const float y = x - 1.0f;
    float sum = fmaf(y, -0.246187665f, 0.293438937f);
    sum = fmaf(y, sum, -0.360620198f);
    sum = fmaf(y, sum, 0.480869499f);
    sum = fmaf(y, sum, -0.721347653f);
    sum = fmaf(y, sum, 1.44269507f);
    return fabsf(y) < 0.125f ? y * sum : lg2_approx(x);
}

// Returns exp(-2 |x|).
inline float exp_minus_2abs(float x) {
    return ex2_approx(-2.88539008177792681472f * fabsf(x));
}

#define TANH_SLOPE
inline float tanh_slope(float x) {
    if (APPROXIMATE) {
        const float y = tanh_approx(x);
        return 1.0f - y * y;
    }
    const float remainder = exp_minus_2abs(x), part = rcp_approx(1.0f + remainder);
    return 4.0f * remainder * part * part;
}

namespace precise {
inline float sqrt(float x) { return sqrt_approx(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float exp(float x) { return ex2_approx(1.44269504f * x); }
inline float log(float x) { return 0.693147181f * lg2_approx(x); }
inline float sin(float x) { return sin_reduced(reduce_range(x)); }
inline float cos(float x) { return cos_approx(reduce_range(x)); }
inline float sin_within(float x) { return sin_reduced(reduce_range_small(x)); }
inline float cos_within(float x) { return cos_approx(reduce_range_small(x)); }
inline float quotient(float x, float y) { return div_full(x, y); }
inline float min(float x, float y) { return fminf(x, y); }
inline float max(float x, float y) { return fmaxf(x, y); }

// bf16 (APPROXIMATE) uses MUFU.TANH, relative error 2^-11, in both passes. Otherwise tanh is computed from the same exponential as tanh_slope, with an
// absolute error of 1.2e-7. Near 0 it returns the argument itself, which keeps the relative error below 2e-5.
inline float tanh(float x) {
    if (APPROXIMATE) return tanh_approx(x);
    const float remainder = exp_minus_2abs(x);
    const float far = (1.0f - remainder) * rcp_approx(1.0f + remainder);
    return fabsf(x) < 0.0071f ? x : copysignf(far, x);
}

// Computes pow(x, y), given log2 |x| as `log`. Branch-free, because diverging lanes would serialise.
inline float power(float x, float y, float log) {
    // pow(x, 0) and pow(1, y) are 1 for all x and y. y * log could be 0 * infinity or 0 * NaN, which is NaN, so the exponent is set to 0 instead.
    const float size = ex2_approx((y == 0.0f) | (log == 0.0f) ? 0.0f : y * log);
    const bool negative = __float_as_int(x) < 0, integer = floorf(y) == y, odd = integer & floorf(0.5f * y) != 0.5f * y;
    const float result = negative & odd ? -size : size;
    return negative & !integer & !isinf(log) ? __int_as_float(0x7fffffff) : result;
}

inline float pow(float x, float y) { return power(x, y, log2_accurate(fabsf(x))); }
inline float pow_within(float x, float y) { return power(x, y, lg2_approx(fabsf(x))); }
inline float pow_of(float, float y, float log2) { return ex2_approx(y * log2); }
}
#endif
