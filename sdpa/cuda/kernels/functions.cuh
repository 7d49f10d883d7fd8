// Functions of traced expressions, by the names that they have in MSL.

#define ERROR_FUNCTION
inline float error_function(float x) {
    return erff(x);
}

// As CUDA's library has them: of what a jump hangs on, and beside f32. Within: of waves of at most 2^24, of powers of at most 64. Of: of
// a positive number whose logarithm is known.
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

// Without whole turns, of at most 2^24: at most 3.8, and off by less than the last digit of a number next to 2.
inline float reduce_range_small(float x) {
    // The last digit of a float next to 1.5 * 2^23 counts whole numbers.
    const float turns = fmaf(x, 0.159154943f, 12582912.0f) - 12582912.0f;
    return fmaf(turns, 1.74845553e-7f, fmaf(turns, -6.28318548f, x));
}

// 1 / (2 pi) in binary, from the digit before 1/2 on.
__constant__ const uint INVERSE_TWO_PI[6] = {0x28be60db, 0x9391054a, 0x7f09d5f4, 0x7d4d3770, 0x36d8a566, 0x4f10e410};

// The same of any number past 2^24 by size: a whole number times a power of two, times as many digits of 1 / (2 pi) as do not come to whole turns.
inline float reduce_range_large(float x) {
    const uint bits = __float_as_uint(x);
    const int power = int(bits >> 23 & 255) - 150, word = power >> 5, by = power & 31;
    const uint digits = bits & 0x7fffff | 0x800000;
    const uint first = __funnelshift_l(INVERSE_TWO_PI[word + 1], INVERSE_TWO_PI[word], by), second = __funnelshift_l(INVERSE_TWO_PI[word + 2], INVERSE_TWO_PI[word + 1], by);
    const float remainder = float(int(digits * first + __umulhi(digits, second))) * 1.46291808e-9f;
    return (int(bits) < 0 ? -remainder : remainder) + (x - x);
}

inline float reduce_range(float x) {
    return fabsf(x) <= 16777216.0f ? reduce_range_small(x) : reduce_range_large(x);
}

// The unit is off by 5e-7 of 1: near 0, where that is more of it, the number itself.
inline float sin_reduced(float angle) {
    return fabsf(angle) < 0.0144f ? angle : sin_approx(angle);
}

// Right to 1e-6 of the result where x is next to 1, too: what great powers hang on.
inline float log2_accurate(float x) {
    const float y = x - 1.0f;
    float sum = fmaf(y, -0.246187665f, 0.293438937f);
    sum = fmaf(y, sum, -0.360620198f);
    sum = fmaf(y, sum, 0.480869499f);
    sum = fmaf(y, sum, -0.721347653f);
    sum = fmaf(y, sum, 1.44269507f);
    return fabsf(y) < 0.125f ? y * sum : lg2_approx(x);
}

// e^(-2|x|).
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

// Beside bf16 as the unit for it has it, off by 1/2,048 of the result, in both passes alike. Otherwise of parts that the slope has too, off by 1.2e-7 at
// most; near 0, where that is more of it, the number itself. Of a result at most 2e-5.
inline float tanh(float x) {
    if (APPROXIMATE) return tanh_approx(x);
    const float remainder = exp_minus_2abs(x);
    const float far = (1.0f - remainder) * rcp_approx(1.0f + remainder);
    return fabsf(x) < 0.0071f ? x : copysignf(far, x);
}

// By the logarithm of |x|. Without a branch: scores that branch apart wait for one another.
inline float power(float x, float y, float log) {
    // Also where the other is infinite, or no number.
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
