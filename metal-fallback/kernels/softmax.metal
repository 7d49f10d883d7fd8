// Numbers of a softmax that is kept in powers of two.

// Stands for the score of a key that is dropped, and for the maximum of a row before its first key. 2^(DROPPED - LOWEST) is 0; both are
// finite, so that nothing depends on how a compiler treats infinities.
#define LOWEST -1e38f
#define DROPPED -3.4e38f
#define LOG2_E 1.44269504088896340736f
#define LN_2 0.69314718055994530942f

// Whether a number is an infinity or not-a-number; by its bits, as a compiler may take every float for finite.
inline bool is_odd(float x) {
    return (as_type<uint>(x) & 0x7f800000u) == 0x7f800000u;
}

// One over the sum of a row's weights. Only a row without keys has the sum 0; one with a NaN keeps it.
inline float inverse_of(float sum) {
    return sum == 0.0f ? 0.0f : 1.0f / sum;
}

// Adds the sink of a row's head to the sum, behind all of the row's keys; what is relative to the maximum before is to be multiplied by what
// this returns. Minus infinity is none. A row without keys stays one.
inline float add_sink(thread float& row_max, thread float& row_sum, float natural) {
    if (row_sum == 0.0f || natural < LOWEST) {
        return 1.0f;
    }
    const float sink = natural * LOG2_E;
    const float largest = max(row_max, sink);
    const float shrink = exp2(row_max - largest);
    row_sum = row_sum * shrink + exp2(sink - largest);
    row_max = largest;
    return shrink;
}

// The largest score of a row, in natural units, from its maximum and its sum in powers of two. A maximum passes NaN over, and the sum tells of it.
inline float row_max_of(float row_max, float row_sum) {
    if (row_sum == 0.0f) {
        return as_type<float>(0xff800000u);
    }
    return is_odd(row_sum) ? row_sum : row_max * LN_2;
}

// The natural logarithm of a row's sum of exponentials, from its maximum and its sum in powers of two.
inline float stats_of(float row_max, float row_sum) {
    return row_sum == 0.0f ? as_type<float>(0xff800000u) : (row_max + log2(row_sum)) * LN_2;
}
