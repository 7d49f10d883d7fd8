// The online softmax. Maxima are scores in natural units; exponentials are powers of two.

// The lowest finite float: the maximum of a row before its first key, and the score of a key that is masked out. A separate flag marks
// masked-out keys, because an additive mask of this size gives the same score to keys that are attended to.
#define LOWEST -3.402823466e38f
#define LOG2_E 1.44269504088896340736f
#define LN_2 0.69314718055994530942f

// Returns whether x is an infinity or NaN. Tests its bits, because a compiler may assume that all floats are finite.
inline bool is_odd(float x) {
    return (as_type<uint>(x) & 0x7f800000u) == 0x7f800000u;
}

// The exponential of a score relative to another one. The scores are subtracted before scaling: the difference of close scores is exact,
// but with scores scaled first, the rounding errors of large products with log2(e) would remain in the argument of exp2.
inline float exp_from(float score, float from) {
    return exp2((score - from) * LOG2_E);
}

// One over the sum of a row's exponentials, or 0 for a row without keys, which alone has the sum 0. A NaN sum stays NaN.
inline float inverse_of(float sum) {
    return sum == 0.0f ? 0.0f : 1.0f / sum;
}

// Adds the sink of a row's head to the sum, after all keys of the row. Returns the factor for values that are relative to the previous
// maximum. A sink of minus infinity adds nothing. A row without keys stays one.
inline float add_sink(thread float& row_max, thread float& row_sum, float sink) {
    if (row_sum == 0.0f || sink < LOWEST) {
        return 1.0f;
    }
    const float largest = max(row_max, sink);
    const float shrink = exp_from(row_max, largest);
    row_sum = row_sum * shrink + exp_from(sink, largest);
    row_max = largest;
    return shrink;
}

// The largest score of a row. max() ignores NaN, but NaN makes the sum NaN, so the sum is returned then.
inline float row_max_of(float row_max, float row_sum) {
    if (row_sum == 0.0f) {
        return as_type<float>(0xff800000u);
    }
    return is_odd(row_sum) ? row_sum : row_max;
}

// The natural logarithm of a row's sum of exponentials.
inline float stats_of(float row_max, float row_sum) {
    return row_sum == 0.0f ? as_type<float>(0xff800000u) : row_max + log2(row_sum) * LN_2;
}
