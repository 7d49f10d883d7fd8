// Row statistics of the forward kernels and the combine kernel: log-sum-exp, maximum, sum of exponentials, and the attention sink.

// From this size on, the row maximum is subtracted from scores before they are scaled, not in the FMA of the exponent: rounding the product of maximum and unit would
// move the exponent by more than 2^-11, and by more than the exponent's range for scores of -1e9. Below, the rounding is one factor per row, which cancels.
constexpr float LARGE_EXPONENT = 16384.0f;

inline bool is_large(float exponent) { return fabsf(exponent) >= LARGE_EXPONENT; }

// The log-sum-exp of a row: `origin`, in units of scores, plus `log`, in base 2. One f32 has no room for the logarithm of the number of keys next to a large maximum.
struct LogSumExp {
    float origin, log;
};

// A score before scaling in units of scores.
inline float natural_score(const Params& p, float x) { return WITH_SCORE_MOD || p.natural ? x : x * p.scale; }

// The row maximum as a log-sum-exp: in `log` if that is exact enough.
inline LogSumExp lse_of_max(const Params& p, float row_max) {
    const float log = row_max * p.softmax_scale_log2;
    return row_max != -INFINITE && is_large(log) ? LogSumExp{natural_score(p, row_max), 0.0f} : LogSumExp{0.0f, log};
}

inline float log2_from(const LogSumExp& x, float score) { return (score - x.origin) * LOG2_E; }

// A row after its sink is added: the new reference of exponentials, the factor of the sum without the sink, and the exponential of the sink.
struct SinkUpdate {
    LogSumExp row_max;
    float scale, sink;
};

inline SinkUpdate with_sink(const LogSumExp& row_max, float score) {
    const float sink = log2_from(row_max, score);
    const bool above = sink > row_max.log;
    SinkUpdate row;
    row.row_max = !above ? row_max : row_max.origin != 0.0f || is_large(sink) ? LogSumExp{score, 0.0f} : LogSumExp{row_max.origin, sink};
    // Both may be -infinity. Nothing is subtracted from itself: in an FMA the rounding of a large sink would be left.
    row.scale = row_max.log == -INFINITE ? 0.0f : above ? ex2_approx(row_max.log - sink) : 1.0f;
    row.sink = above ? 1.0f : sink == -INFINITE ? 0.0f : ex2_approx(sink - row_max.log);
    return row;
}

// Writes the statistics of a row. `natural_max` is its maximum, `sum` the sum of exponentials relative to that. A row past the length is one without
// keys.
inline void store_statistics(const Params& p, long at, bool there, const LogSumExp& total, float natural_max, float sum) {
#if WITH_STATS
    const float stat = WITH_BASE_TWO ? total.origin * LOG2_E + total.log : total.origin + total.log * LN_2;
    // Finite scores have finite statistics, even where base 2 has no such number.
    const float finite = total.origin != 0.0f && total.log != -INFINITE ? fminf(fmaxf(stat, -3.402823466e38f), 3.402823466e38f) : stat;
    p.stats[at] = there ? finite : -INFINITE;
#endif
#if WITH_ROW_MAX
    // fmaxf has dropped NaN scores; the sum has them.
    const float row_max = sum == sum ? natural_max : sum;
    p.row_max[at] = there ? row_max : -INFINITE;
#endif
#if WITH_SUM_EXP
    p.sum_exp[at] = there ? sum : 0.0f;
#endif
}
