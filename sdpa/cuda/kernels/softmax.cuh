// Online softmax (Milakov and Gimelshein, 2018; FlashAttention, algorithm 1) over the scores that a thread holds, for the forward kernels. A thread has two
// rows, which four neighbouring threads share.

constexpr int SCORES = TILE_N / 2;

#if LAZY_RESCALE
// A row is rescaled when its maximum has grown by more than this, in base 2, since the last time (FlashAttention-4). Exponentials are at most 2^8, which f16
// holds. Without lazy rescaling the maximum is the reference of the exponentials.
constexpr float RESCALE_THRESHOLD = 8.0f;
#endif

// State of a thread's two rows, in unscaled scores: maximum, sum of exponentials, and the reference that they are relative to.
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

// The threads of a row.
inline float row_reduce_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

inline float row_reduce_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Masks the scores outside of the keys that the queries `q` of the thread's rows attend to. `column`: the key of its first score.
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

// One update: exponentials in place of scores, and the factor by which O and the sum of each row are rescaled.
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
        // A growth of NaN, of two maxima of -infinity, is not larger.
        const float before = state.reference[half], growth = (row_max - before) * unit;
        const bool larger = growth > RESCALE_THRESHOLD;
        const float from = larger ? row_max : before;
        rescale[half] = larger ? ex2_approx(-growth) : 1.0f;
        state.reference[half] = from;
#else
        const float from = row_max;
#endif
        // A row without keys so far has no maximum, and its exponentials are 0.
        float base = from == -INFINITE ? 0.0f : from * unit;
#if !LAZY_RESCALE
        rescale[half] = from == -INFINITE ? 1.0f : ex2_approx((state.row_max[half] - from) * unit);
        state.row_max[half] = from;
#endif
        // Rare, and the same for the whole warp: exponents are relative to 0 then.
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

// A row after its last block: its sum of exponentials, what these are relative to, how far the maximum is above that in base 2, the maximum as a score, and
// the factor that normalises O.
struct RowTotal {
    float sum;
    LogSumExp reference;
    float above, natural_max, inverse_sum;
};

inline RowTotal row_total(SoftmaxState& state, int half, const Params& p) {
    RowTotal row;
    row.sum = row_reduce_sum(state.row_sum[half]);
    row.reference = lse_of_max(p, reference_of(state, half));
    row.above = (state.row_max[half] - reference_of(state, half)) * p.softmax_scale_log2;
    row.natural_max = natural_score(p, state.row_max[half]);
    row.inverse_sum = row.sum == 0.0f ? 0.0f : 1.0f / row.sum;
    return row;
}

inline LogSumExp lse_of(const RowTotal& row) {
    return LogSumExp{row.reference.origin, row.sum == 0.0f ? -INFINITE : row.reference.log + log2f(row.sum)};
}

// Adds the attention sink of the row's head.
inline void add_sink(RowTotal& row, float sink) {
    const SinkUpdate update = with_sink(row.reference, sink);
    row.sum = row.sum * update.scale + update.sink;
    row.inverse_sum = row.sum == 0.0f ? 0.0f : update.scale / row.sum;
    // The sink replaced the reference; the maximum may still be above the sink.
    if (LAZY_RESCALE && update.scale < 1.0f) row.above = fmaxf(0.0f, row.above + log2f(update.scale));
    row.reference = update.row_max;
    row.natural_max = fmaxf(row.natural_max, sink);
}

// The sum of exponentials relative to the maximum.
inline float sum_from_max(const RowTotal& row) {
    return !LAZY_RESCALE ? row.sum : row.sum == 0.0f ? 0.0f : row.sum * ex2_approx(-row.above);
}
