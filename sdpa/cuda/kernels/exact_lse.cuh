// Log-sum-exps of rows with large scores, as two f32. One f32 cannot represent the logarithm of the number of keys next to a maximum of -1e9, which an
// additive mask can give to a whole row. The backward preprocess kernels recompute these log-sum-exps.

// Log-sum-exps in base 2 of at least this size are recomputed. Below it, rounding them to f32 changes P by less than rounding P to its element type
// does.
constexpr float LARGE_LSE = sizeof(Element) == 4 ? 512.0f : 4096.0f;

// A log-sum-exp of infinity stands for a row without keys, so it does not count as large.
inline bool is_large(float lse) { return fabsf(lse) >= LARGE_LSE && lse != INFINITE; }

// Converts a row's `stats` value to a log-sum-exp in base 2. A finite value stays finite; -infinity, of a row without keys, becomes infinity.
inline float lse_of_stat(float stat) { return stat == -INFINITE ? INFINITE : fminf(fmaxf(stat * LOG2_E, -3.402823466e38f), 3.402823466e38f); }

// A log-sum-exp as two f32: P = exp2((x - row_max) * factor - log2_sum), where x is a score that the backward kernels multiply by `factor`.
struct ExactLse {
    float row_max, log2_sum;
};

// Returns the base-2 exponent of P for a score.
inline float exponent_of(float x, float factor, const ExactLse& lse) { return (x - lse.row_max) * factor - lse.log2_sum; }

// Returns the factor that converts a score of the backward kernels to natural units.
inline float natural_of(float factor) { return WITH_SCORE_MOD ? 1.0f : factor / LOG2_E; }

// A warp computes the log-sum-exp of a row. `score_at(k, x)` sets x to the score that is multiplied by `factor`, and returns whether the query attends
// to key k.
template <class Score>
inline ExactLse log_sum_exp(const Range& keys, float factor, Score score_at) {
    const float sign = factor < 0.0f ? -1.0f : 1.0f, unit = sign * factor;
    float row_max = -INFINITE, sum = 0.0f;
    for (int k = keys.begin + int(threadIdx.x & 31); k < keys.end; k += 32) {
        float x;
        if (!score_at(k, x)) continue;
        x *= sign;
        if (x > row_max) {
            sum = sum * ex2_approx((row_max - x) * unit) + 1.0f;
            row_max = x;
        } else if (x != -INFINITE) {
            sum += ex2_approx((x - row_max) * unit);
        }
    }
    float all = row_max;
    for (int apart = 16; apart > 0; apart /= 2) all = fmaxf(all, __shfl_xor_sync(~0u, all, apart));
    sum = row_max == -INFINITE ? 0.0f : sum * ex2_approx((row_max - all) * unit);
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    return all == -INFINITE ? ExactLse{0.0f, -INFINITE} : ExactLse{all * sign, log2f(sum)};
}

// Returns by how much a sink is above `row_max`, in base 2. `natural` converts scores to the units of sinks. The arithmetic is uncontracted, so that
// every call gives the same number.
inline float sink_above(const ExactLse& row, float natural, float sink) {
    return __fmul_rn(__fsub_rn(sink, __fmul_rn(row.row_max, natural)), LOG2_E);
}

inline ExactLse with_sink(const ExactLse& keys, float natural, float sink) {
    if (keys.log2_sum == -INFINITE) return ExactLse{0.0f, sink * LOG2_E};
    const float above = sink_above(keys, natural, sink), difference = above - keys.log2_sum;
    return ExactLse{keys.row_max, fmaxf(above, keys.log2_sum) + log2f(1.0f + ex2_approx(-fabsf(difference)))};
}

// Returns P of the sink.
inline float sink_probability(const ExactLse& row, float natural, float stat, float sink) {
    return ex2_approx(row.row_max == 0.0f ? (sink - stat) * LOG2_E : __fsub_rn(sink_above(row, natural, sink), row.log2_sum));
}

// Returns the recomputed log-sum-exp if it rounds to the caller's statistic, else the statistic itself. The statistic may differ because the caller merged
// results over several parts of the keys, which makes the statistic larger.
inline ExactLse nearest_to(float stat, float natural, const ExactLse& sum) {
    const float off = sum.row_max * natural + sum.log2_sum * LN_2 - stat;
    return fabsf(off) <= fabsf(stat) * 2.384185791015625e-7f ? sum : ExactLse{0.0f, stat * LOG2_E};
}

// Applies the score_mod to a score; returns false if the mask excludes the key.
inline bool traced_score(const Params& p, const Captured& captured, int batch, int head, int q, int k, float& x) {
#if WITH_SCORE_MOD || WITH_KEEP
    const Place at = place_at(p, batch, head, q, k, 0, 0);
#endif
#if WITH_SCORE_MOD
    x = score_mod(x, at, captured);
#endif
#if WITH_KEEP
    return keep(at, captured);
#else
    return true;
#endif
}

// One warp writes the exact log-sum-exps of rows [first, first + rows) to `to`, `apart` elements apart. It recomputes those of at least LARGE_LSE, for
// which the f32 of `stats` is too coarse, and also writes their log2 sums to `log2_sums` if that is not null. Returns whether any row was recomputed.
template <class Score>
inline bool recompute_large_lse(const Params& p, const SeqInfo& seq_info, int batch, int head, int first, int rows, float factor, float2* to, long apart,
                                float* log2_sums, Score score_at) {
    const int lane = threadIdx.x & 31, own = first + lane;
    const bool there = lane < rows && own < seq_info.len_q;
    const float stat = there ? p.stats[stats_index(p, seq_info, batch, head, own)] : -INFINITE;
    const float lse = lse_of_stat(stat), natural = natural_of(factor);
    if (lane < rows) to[lane * apart] = float2{0.0f, lse};
    const uint large = __ballot_sync(~0u, is_large(lse));
    for (uint left = large; left != 0; left &= left - 1) {
        const int at = __ffs(left) - 1, q = first + at;
        const auto of_row = [&](int k, float& x) { return score_at(q, k, x); };
        ExactLse sum = log_sum_exp(attended_keys(p, seq_info, q), factor, of_row);
#if WITH_SINK
        sum = with_sink(sum, natural, p.sink[head]);
#endif
        const ExactLse exact = nearest_to(__shfl_sync(~0u, stat, at), natural, sum);
        if (lane == at) to[at * apart] = float2{exact.row_max, exact.log2_sum};
        if (lane == at && log2_sums) log2_sums[at * apart] = exact.log2_sum;
    }
    return large != 0;
}
