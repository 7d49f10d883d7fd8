// Online softmax (Milakov and Gimelshein, 2018; FlashAttention, algorithm 1) over the scores in a thread's registers, for the forward kernels. A thread
// has scores of two rows; four neighbouring threads share a row.

constexpr int SCORES = TILE_N / 2;

#if LAZY_RESCALE
// With LAZY_RESCALE a row is rescaled only when its maximum has grown by more than this, in base 2, since its last rescaling (as in FlashAttention-4).
// Exponentials are then at most 2^8, which f16 can represent. Without LAZY_RESCALE they are relative to the current maximum.
constexpr float RESCALE_THRESHOLD = 8.0f;
#endif

// State of a thread's two rows: maximum, sum of exponentials, and the reference score that is subtracted before exponentiation. Maximum and reference
// are scores before multiplication by softmax_scale_log2.
struct SoftmaxState {
    float row_max[2];
    float row_sum[2];
#if LAZY_RESCALE
    float reference[2];
#endif
};

inline SoftmaxState empty_softmax() {
#if LAZY_RESCALE
    return SoftmaxState{{-INFINITE, -INFINITE}, {0.0f, 0.0f}, {-INFINITE, -INFINITE}};
#else
    return SoftmaxState{{-INFINITE, -INFINITE}, {0.0f, 0.0f}};
#endif
}

inline float& reference_of(SoftmaxState& state, int half) {
#if LAZY_RESCALE
    return state.reference[half];
#else
    return state.row_max[half];
#endif
}

// Reduces over the four threads that share a row.
inline float row_reduce_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

inline float row_reduce_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Sets scores to -infinity where a query does not attend to the key by band, prefix or lengths. `q`: the queries of the thread's two rows; `column`:
// the key of the thread's first score.
inline void mask_scores(float (&s)[SCORES], const Params& p, const SeqInfo& seq_info, const int (&q)[2], int column) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const Range bounds = attended_keys(p, seq_info, q[half]);
#pragma unroll
        for (int n = 2 * half; n < SCORES; n = next_in_row(n)) {
            if (!bounds.contains(fragment_column(column, n))) s[n] = -INFINITE;
        }
    }
}

// One step of the online softmax: replaces scores by exponentials, updates the state, and sets `rescale` to the factor by which the caller rescales
// each row of O.
inline void online_softmax(float (&s)[SCORES], SoftmaxState& state, float (&rescale)[2], const Params& p) {
    const float unit = p.softmax_scale_log2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float row_max = LAZY_RESCALE ? -INFINITE : state.row_max[half];
#pragma unroll
        for (int n = 2 * half; n < SCORES; n += 4) row_max = fmaxf(row_max, fmaxf(s[n], s[n + 1]));
        row_max = row_reduce_max(row_max);
#if LAZY_RESCALE
        state.row_max[half] = fmaxf(state.row_max[half], row_max);
        // If both maxima are -infinity, `growth` is NaN and the comparison is false: the row is not rescaled.
        const float before = state.reference[half], growth = (row_max - before) * unit;
        const bool larger = growth > RESCALE_THRESHOLD;
        const float from = larger ? row_max : before;
        rescale[half] = larger ? ex2_approx(-growth) : 1.0f;
        state.reference[half] = from;
#else
        const float from = row_max;
#endif
        // A row without attended keys so far has a maximum of -infinity. With a base of 0 its exponentials are 0 instead of NaN.
        float base = from == -INFINITE ? 0.0f : from * unit;
#if !LAZY_RESCALE
        rescale[half] = from == -INFINITE ? 1.0f : ex2_approx((state.row_max[half] - from) * unit);
        state.row_max[half] = from;
#endif
        // Rare: a large maximum is subtracted before scaling, and `base` becomes 0 (see LARGE_EXPONENT). All lanes of the warp branch together.
        if (__builtin_expect(__any_sync(~0u, is_large(base)), 0)) {
            const float large = is_large(base) ? from : 0.0f;
            if (large != 0.0f) base = 0.0f;
#pragma unroll
            for (int n = 2 * half; n < SCORES; n = next_in_row(n)) s[n] -= large;
        }
        float sum = 0.0f;
#pragma unroll
        for (int n = 2 * half; n < SCORES; n = next_in_row(n)) {
            s[n] = ex2_approx(s[n] * unit - base);
            sum += s[n];
        }
        state.row_sum[half] = state.row_sum[half] * rescale[half] + sum;
    }
}

// Totals of a row after its last KV block: the sum of exponentials, the reference that they are relative to, by how much the maximum is above the
// reference (in base 2), the maximum as a score, and the factor that normalises O.
struct RowTotal {
    float sum;
    LogSumExp reference;
    float above, natural_max, inverse_sum;
};

// `sum`: of the exponentials relative to `reference`.
inline RowTotal row_total(float reference, float sum, float row_max, const Params& p) {
    RowTotal row;
    row.sum = sum;
    row.reference = lse_of_max(p, reference);
    row.above = (row_max - reference) * p.softmax_scale_log2;
    row.natural_max = natural_score(p, row_max);
    row.inverse_sum = row.sum == 0.0f ? 0.0f : 1.0f / row.sum;
    return row;
}

inline RowTotal row_total(SoftmaxState& state, int half, const Params& p) {
    // With splits of fixed size, the sum is reduced at the end of each split.
    const float sum = FIXED_SPLIT ? state.row_sum[half] : row_reduce_sum(state.row_sum[half]);
    return row_total(reference_of(state, half), sum, state.row_max[half], p);
}

inline LogSumExp lse_of(const RowTotal& row) {
    return LogSumExp{row.reference.origin, row.sum == 0.0f ? -INFINITE : row.reference.log + log2f(row.sum)};
}

// Adds the attention sink of the row's head.
inline void add_sink(RowTotal& row, float sink) {
    const SinkUpdate update = with_sink(row.reference, sink);
    row.sum = row.sum * update.scale + update.sink;
    row.inverse_sum = row.sum == 0.0f ? 0.0f : update.scale / row.sum;
    // If `scale` is below 1, the sink has become the reference. With lazy rescaling, the row maximum may still be above the sink.
    if (LAZY_RESCALE && update.scale < 1.0f) row.above = fmaxf(0.0f, row.above + log2f(update.scale));
    row.reference = update.row_max;
    row.natural_max = fmaxf(row.natural_max, sink);
}

// Returns the sum of exponentials relative to the row maximum.
inline float sum_from_max(const RowTotal& row) {
    return !LAZY_RESCALE ? row.sum : row.sum == 0.0f ? 0.0f : row.sum * ex2_approx(-row.above);
}
