// Row statistics: log-sum-exp, largest score, sum of exponentials.

// From this size on, the row maximum is subtracted from scores before they are scaled, not in the FMA of the exponent: rounding the product of maximum and unit would
// move the exponent by more than 2^-11, and by more than the exponent's range for scores of -1e9. Below, the rounding is one factor per row, which cancels.
constexpr float LARGE_EXPONENT = 16384.0f;

inline bool is_large(float exponent) { return fabsf(exponent) >= LARGE_EXPONENT; }

// The log-sum-exp of a row: `origin`, in units of scores, plus `log`, in base 2. One f32 has no room for the logarithm of the number of keys next to a large maximum.
struct LogSum {
    float origin, log;
};

// A score before scaling in units of scores.
inline float score_of(const Params& p, float x) { return WITH_SCORE_MOD || p.natural ? x : x * p.scale; }

// The row maximum as a log-sum-exp: in `log` if that is exact enough.
inline LogSum log_of_most(const Params& p, float most) {
    const float log = most * p.unit;
    return most != -INFINITE && is_large(log) ? LogSum{score_of(p, most), 0.0f} : LogSum{0.0f, log};
}

inline float log2_from(const LogSum& x, float score) { return (score - x.origin) * LOG2_E; }

// A row with its sink: what exponentials are relative to now, the factor of the sum without the sink, and the exponential of the sink.
struct Sunk {
    LogSum most;
    float part, own;
};

inline Sunk with_sink(const LogSum& most, float score) {
    const float sink = log2_from(most, score);
    const bool above = sink > most.log;
    Sunk row;
    row.most = !above ? most : most.origin != 0.0f || is_large(sink) ? LogSum{score, 0.0f} : LogSum{most.origin, sink};
    // Both may be -infinity. Nothing is subtracted from itself: in an FMA the rounding of a large sink would be left.
    row.part = most.log == -INFINITE ? 0.0f : above ? ex2_approx(most.log - sink) : 1.0f;
    row.own = above ? 1.0f : sink == -INFINITE ? 0.0f : ex2_approx(sink - most.log);
    return row;
}

// Writes the statistics of a row. `largest` is its largest score, `sum` the sum of exponentials relative to that. A row past the length is one without keys.
inline void store_statistics(const Params& p, long at, bool there, const LogSum& total, float largest, float sum) {
#if WITH_STATS
    const float stat = WITH_BASE_TWO ? total.origin * LOG2_E + total.log : total.origin + total.log * LN_2;
    // Finite scores have finite statistics, even where base 2 has no such number.
    const float finite = total.origin != 0.0f && total.log != -INFINITE ? fminf(fmaxf(stat, -3.402823466e38f), 3.402823466e38f) : stat;
    p.stats[at] = there ? finite : -INFINITE;
#endif
#if WITH_ROW_MAX
    // fmaxf has dropped NaN scores; the sum has them.
    const float most = sum == sum ? largest : sum;
    p.row_max[at] = there ? most : -INFINITE;
#endif
#if WITH_SUM_EXP
    p.sum_exp[at] = there ? sum : 0.0f;
#endif
}
