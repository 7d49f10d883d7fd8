// attention_combine: merges the splits of the keys of each query tile (split-KV). One warp per row.

inline float warp_max(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
    return x;
}

inline float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

#if FIXED_SPLIT
// Merges the splits of a row from the last to the first and writes the row's output and statistics. `place` returns where a split's result is.
template <class Place>
inline void merge_splits(const Params& p, const SeqInfo& seq_info, int batch, int head, int q, int splits, const Place& place) {
    const int lane = threadIdx.x & 31;
    PartialRow row = {-INFINITE, 0.0f, -INFINITE};
    float2 o[DIM_V / 64] = {};
    for (int split = splits - 1; split >= 0 && q < seq_info.len_q; split--) {
        const long at = place(split);
        const float2 sum = p.split_lse[at];
#if WITH_SPLIT_MAX
        const float row_max = p.split_row_max[at];
#else
        const float row_max = sum.x;
#endif
        const SplitMerge merge = merge_split(row, PartialRow{sum.x, sum.y, row_max}, p);
#pragma unroll
        for (int n = 0; n < DIM_V / 64; n++) {
            const float2 next = *(const float2*)(p.split_o + at * DIM_V + 64 * n + 2 * lane);
            o[n] = float2{merged(merge, o[n].x, next.x), merged(merge, o[n].y, next.y)};
        }
    }
    RowTotal total = row_total(row.reference, row.sum, row.row_max, p);
#if WITH_SINK
    add_sink(total, p.sink[head]);
#endif
    if (lane == 0) store_statistics(p, stats_index(p, seq_info, batch, head, q), q < seq_info.len_q, lse_of(total), total.natural_max, sum_from_max(total));
    const float scale = q < seq_info.len_q ? total.inverse_sum : 0.0f;
    unsigned short* const to = output_row(p, seq_info, batch, head, q);
#pragma unroll
    for (int n = 0; n < DIM_V / 64; n++)
        store_pair(p, to, 64 * n + 2 * lane, scale == 0.0f ? 0u : pack_pair(Element{}, o[n].x * scale, o[n].y * scale));
}
#endif

// Returns the log-sum-exp of a split in base 2, relative to `all.origin`, which is common to all splits.
inline float split_log2(const LogSumExp& split, const LogSumExp& all) { return log2_from(all, split.origin) + split.log; }

extern "C" __global__ void __launch_bounds__(128, 1) attention_combine(const __grid_constant__ Params p) {
    constexpr int EACH = (TILE_ROWS + 3) / 4;
    const int lane = threadIdx.x & 31, row = int(blockIdx.x) % EACH * 4 + int(threadIdx.x >> 5), whose = int(blockIdx.x) / EACH;
    const int unit = whose % p.head_groups, tile_number = whose / p.head_groups % p.tiles, batch = whose / p.head_groups / p.tiles;
    const SeqInfo seq_info = seq_info_of(p, batch);
    const Tile tile = {tile_number, batch, first_head(p, unit), 0, 1, 0, 0};
    if (row >= TILE_ROWS || tile_number >= tile_count_of(p, seq_info) || !has_row(p, seq_info, tile, row)) return;
    const int first = p.first_items[batch * p.tiles + tile_number];
    if (first >= p.max_items) return;
    const int splits = min(p.tile_items[first].splits, p.max_items - first);
    // The forward kernel itself has written the output of tiles with one split.
    if (splits <= 1) return;
    const int q = query_of_row(tile, row), head = head_of_row(tile, row);
    const auto place = [&](int split) { return (long(first + split) * p.head_groups + unit) * TILE_ROWS + row; };
    const auto lse_of_split = [&](int split) {
        const float2 both = p.split_lse[place(split)];
        return LogSumExp{both.x, both.y};
    };
#if FIXED_SPLIT
    return merge_splits(p, seq_info, batch, head, q, splits, place);
#else
    LogSumExp row_max = {0.0f, -INFINITE};
    float sum = 0.0f, natural_max = -INFINITE;
    if (q < seq_info.len_q) {
#if WITH_SPLIT_MAX
        for (int split = lane; split < splits; split += 32) natural_max = fmaxf(natural_max, p.split_row_max[place(split)]);
        natural_max = warp_max(natural_max);
#if WITH_SINK
        natural_max = fmaxf(natural_max, p.sink[head]);
#endif
#endif
        // Find the largest origin among the splits that have keys.
        row_max.origin = -INFINITE;
        for (int split = lane; split < splits; split += 32) {
            const LogSumExp log = lse_of_split(split);
            if (log.log != -INFINITE) row_max.origin = fmaxf(row_max.origin, log.origin);
        }
        row_max.origin = warp_max(row_max.origin);
        if (row_max.origin == -INFINITE) row_max.origin = 0.0f;
        for (int split = lane; split < splits; split += 32) row_max.log = fmaxf(row_max.log, split_log2(lse_of_split(split), row_max));
        row_max.log = warp_max(row_max.log);
#if WITH_SINK
        const SinkUpdate row = with_sink(row_max, p.sink[head]);
        row_max = row.row_max;
#endif
        // If no split has keys, the maximum is -infinity. Subtract 0 instead, so that the exponentials are 0 and not NaN. NaN in a split still makes
        // the sum NaN.
        if (row_max.log == -INFINITE) row_max.log = 0.0f;
        for (int split = lane; split < splits; split += 32) sum += ex2_approx(split_log2(lse_of_split(split), row_max) - row_max.log);
        sum = warp_sum(sum);
#if WITH_SINK
        sum += row.sink;
#endif
    }
    if (lane == 0) {
        const LogSumExp total = {row_max.origin, sum == 0.0f ? -INFINITE : log2f(sum) + row_max.log};
        store_statistics(p, stats_index(p, seq_info, batch, head, q), true, total, natural_max,
                         sum == 0.0f ? 0.0f : sum * ex2_approx(row_max.log - log2_from(row_max, natural_max)));
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    unsigned short* const to = output_row(p, seq_info, batch, head, q);
    for (int column = 2 * lane; column < DIM_V; column += 64) {
        float low = 0.0f, high = 0.0f;
        for (int split = 0; split < splits && sum != 0.0f; split++) {
            const float weight = ex2_approx(split_log2(lse_of_split(split), row_max) - row_max.log) * inverse;
            // Skip a split of weight 0: its O may be NaN.
            if (weight == 0.0f) continue;
            const float* const from = p.split_o + place(split) * DIM_V + column;
            low += weight * from[0];
            high += weight * from[1];
        }
        store_pair(p, to, column, pack_pair(Element{}, low, high));
    }
#endif
}
