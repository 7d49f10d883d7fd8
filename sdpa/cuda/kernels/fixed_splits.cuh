// Splits of fixed size, for batch-invariant problems. The keys of a sequence are divided into splits of FIXED_SPLIT KV blocks, counted from its first
// key. The softmax of a row begins anew with each split, and the results are merged from the last split to the first. A CTA processes one split of a
// tile or all of them; the merge rounds the same in both cases.

// Result of a row over one or more splits, without O: the sum of exponentials relative to `reference`, and the maximum. Both are scores before
// multiplication by softmax_scale_log2. A row without keys has the sum 0.
struct PartialRow {
    float reference, sum, row_max;
};

// How the next split is merged into a row. Weights are used only if both have keys, so that a split without keys does not even change the sign of a zero.
struct SplitMerge {
    bool keeps, takes;
    float before, next;
};

// Sums are rounded as written: FMAs that the compiler forms could differ between the kernels.
inline SplitMerge merge_split(PartialRow& row, const PartialRow& next, const Params& p) {
    const float unit = p.softmax_scale_log2, reference = fmaxf(row.reference, next.reference);
    SplitMerge merge;
    // A sum of NaN is not 0, and stays NaN.
    merge.keeps = next.sum == 0.0f;
    merge.takes = row.sum == 0.0f;
    merge.before = row.reference == reference ? 1.0f : ex2_approx(__fmul_rn(__fsub_rn(row.reference, reference), unit));
    merge.next = next.reference == reference ? 1.0f : ex2_approx(__fmul_rn(__fsub_rn(next.reference, reference), unit));
    const float sum = __fmaf_rn(merge.before, row.sum, __fmul_rn(merge.next, next.sum));
    const PartialRow both = {reference, sum, fmaxf(row.row_max, next.row_max)};
    if (!merge.keeps) row = merge.takes ? next : both;
    return merge;
}

inline float merged(const SplitMerge& merge, float before, float next) {
    const float both = __fmaf_rn(merge.before, before, __fmul_rn(merge.next, next));
    return merge.keeps ? before : merge.takes ? next : both;
}

// Sums the exponentials of the last split over the four threads that share a row.
inline void finish_split(SoftmaxState& state) {
#pragma unroll
    for (int half = 0; half < 2; half++) state.row_sum[half] = row_reduce_sum(state.row_sum[half]);
}

inline PartialRow partial_row(SoftmaxState& state, int half) {
    return PartialRow{reference_of(state, half), state.row_sum[half], state.row_max[half]};
}

inline void set_partial_row(SoftmaxState& state, int half, const PartialRow& row) {
    state.row_max[half] = row.row_max;
    state.row_sum[half] = row.sum;
    reference_of(state, half) = row.reference;
}

#if MERGES_SPLITS
// Shared memory for the result of the previous splits of the warp's rows. O, in f32, takes the memory of the output: each thread stores the registers
// that it holds, so only lanes of one warp share memory.
struct SplitBuffer {
    uint o, rows;

    inline uint of_register(int n) const { return o + n / 16 * (CTA_ROWS * 128) + n % 16 * 128 + (threadIdx.x & 31) * 4; }
    inline uint of_row(int half) const { return rows + (thread_row(threadIdx.x & 31) + 8 * half) * 12; }
};

// Merges the registers, which hold the result of a split, into the buffer (`to_buffer`) or the buffer into the registers. `merges`: the buffer has the
// result of the splits before.
template <bool to_buffer, int outputs>
inline void merge_buffer(float (&o)[outputs], SoftmaxState& state, const SplitBuffer& buffer, bool merges, const Params& p) {
    SplitMerge merge[2] = {{false, true, 0.0f, 1.0f}, {false, true, 0.0f, 1.0f}};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint at = buffer.of_row(half);
        const PartialRow next = partial_row(state, half);
        PartialRow row = next;
        if (merges) {
            row = PartialRow{__uint_as_float(ld_shared(at)), __uint_as_float(ld_shared(at + 4)), __uint_as_float(ld_shared(at + 8))};
            merge[half] = merge_split(row, next, p);
        }
        if (!to_buffer) set_partial_row(state, half, row);
        // All four lanes of a row must have read it.
        __syncwarp();
        if (to_buffer && (threadIdx.x & 3) == 0) {
            st_shared(at, __float_as_uint(row.reference));
            st_shared(at + 4, __float_as_uint(row.sum));
            st_shared(at + 8, __float_as_uint(row.row_max));
        }
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < outputs; n++) {
        const uint at = buffer.of_register(n);
        const float value = merges ? merged(merge[fragment_half(n)], __uint_as_float(ld_shared(at)), o[n]) : o[n];
        if (to_buffer) st_shared(at, __float_as_uint(value));
        else o[n] = value;
    }
}
#endif
