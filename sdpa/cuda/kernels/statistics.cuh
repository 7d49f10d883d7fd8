// Row statistics of the forward kernels and the combine kernel: log-sum-exp, maximum, sum of exponentials, and the attention sink.

// If |row maximum * softmax_scale_log2| is at least this, the maximum is subtracted from the scores before scaling instead of in the FMA that computes
// the exponent. In that FMA, rounding the product would shift the exponent by more than 2^-11 (for scores near -1e9, so far that exp2 overflows or
// underflows). Below this threshold the shift does no harm: it multiplies a whole row by one factor near 1, which cancels in the normalisation.
constexpr float LARGE_EXPONENT = 16384.0f;

inline bool is_large(float exponent) { return fabsf(exponent) >= LARGE_EXPONENT; }

// The log-sum-exp of a row: `origin`, in units of scores, plus `log`, in base 2. One f32 cannot represent the logarithm of the number of keys next to a
// large maximum.
struct LogSumExp {
    float origin, log;
};

// Converts a score, as passed to online_softmax, to a scaled score. With a score_mod or `natural` it has been multiplied by `scale` before.
inline float natural_score(const Params& p, float x) { return WITH_SCORE_MOD || p.natural ? x : x * p.scale; }

// Represents the row maximum as a log-sum-exp: in `log`, or in `origin` if `log` would be too large to be exact enough.
inline LogSumExp lse_of_max(const Params& p, float row_max) {
    const float log = row_max * p.softmax_scale_log2;
    return row_max != -INFINITE && is_large(log) ? LogSumExp{natural_score(p, row_max), 0.0f} : LogSumExp{0.0f, log};
}

inline float log2_from(const LogSumExp& x, float score) { return (score - x.origin) * LOG2_E; }

// A row after its sink is added: `row_max` is the new reference of exponentials, `scale` the factor for the sum over keys, `sink` the exponential of
// the sink.
struct SinkUpdate {
    LogSumExp row_max;
    float scale, sink;
};

inline SinkUpdate with_sink(const LogSumExp& row_max, float score) {
    const float sink = log2_from(row_max, score);
    const bool above = sink > row_max.log;
    SinkUpdate row;
    row.row_max = !above ? row_max : row_max.origin != 0.0f || is_large(sink) ? LogSumExp{score, 0.0f} : LogSumExp{row_max.origin, sink};
    // Maximum and sink may both be -infinity, whose difference is NaN. The exponential of the larger one is written as 1, not as exp2(x - x): as an FMA, x
    // - x would be the rounding error of a large sink.
    row.scale = row_max.log == -INFINITE ? 0.0f : above ? ex2_approx(row_max.log - sink) : 1.0f;
    row.sink = above ? 1.0f : sink == -INFINITE ? 0.0f : ex2_approx(sink - row_max.log);
    return row;
}

// Writes the statistics of a row. `natural_max` is the row maximum, `sum` the sum of exponentials relative to it. `there` is false for a row past the
// length, which gets the statistics of a row without keys.
inline void store_statistics(const Params& p, long at, bool there, const LogSumExp& total, float natural_max, float sum) {
#if WITH_STATS
    const float stat = WITH_BASE_TWO ? total.origin * LOG2_E + total.log : total.origin + total.log * LN_2;
    // Finite scores must give a finite statistic, but converting a large log-sum-exp to base 2 may overflow. So clamp it.
    const float finite = total.origin != 0.0f && total.log != -INFINITE ? fminf(fmaxf(stat, -3.402823466e38f), 3.402823466e38f) : stat;
    p.stats[at] = there ? finite : -INFINITE;
#endif
#if WITH_ROW_MAX
    // fmaxf ignores NaN scores, but they make the sum NaN. Report NaN as the maximum too.
    const float row_max = sum == sum ? natural_max : sum;
    p.row_max[at] = there ? row_max : -INFINITE;
#endif
#if WITH_SUM_EXP
    p.sum_exp[at] = there ? sum : 0.0f;
#endif
}
