// What the parts of a tile's keys come to together. A warp has a row.

inline float most_of_warp(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
    return x;
}

inline float total_of_warp(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

// The log-sum-exp of a split in base 2, relative to the origin of all.
inline float log2_of_part(const LogSum& part, const LogSum& all) { return log2_from(all, part.origin) + part.log; }

extern "C" __global__ void __launch_bounds__(128, 1) attention_merged(const __grid_constant__ Params p) {
    constexpr int EACH = (TILE_ROWS + 3) / 4;
    const int lane = threadIdx.x & 31, row = int(blockIdx.x) % EACH * 4 + int(threadIdx.x >> 5), whose = int(blockIdx.x) / EACH;
    const int unit = whose % p.units, number = whose / p.units % p.tiles, batch = whose / p.units / p.tiles;
    const Span span = span_of(p, batch);
    const Tile tile = {number, batch, first_head(p, unit), 0, 1, 0, 0};
    if (row >= TILE_ROWS || number >= tiles_of(p, span) || !has_row(p, span, tile, row)) return;
    const int first = p.firsts[batch * p.tiles + number];
    if (first >= p.most_items) return;
    const int parts = min(p.items[first].parts, p.most_items - first);
    // What has one part is written as it is.
    if (parts <= 1) return;
    const int q = query_of(tile, row), head = head_of(tile, row);
    const auto place = [&](int part) { return (long(first + part) * p.units + unit) * TILE_ROWS + row; };
    const auto log_of = [&](int part) {
        const float2 both = p.part_logs[place(part)];
        return LogSum{both.x, both.y};
    };
    LogSum most = {0.0f, -INFINITE};
    float sum = 0.0f, largest = -INFINITE;
    if (q < span.len_q) {
#if WITH_LARGEST
        for (int part = lane; part < parts; part += 32) largest = fmaxf(largest, p.part_largest[place(part)]);
        largest = most_of_warp(largest);
#if WITH_SINK
        largest = fmaxf(largest, p.sink[head]);
#endif
#endif
        // The largest origin of the splits that have keys.
        most.origin = -INFINITE;
        for (int part = lane; part < parts; part += 32) {
            const LogSum log = log_of(part);
            if (log.log != -INFINITE) most.origin = fmaxf(most.origin, log.origin);
        }
        most.origin = most_of_warp(most.origin);
        if (most.origin == -INFINITE) most.origin = 0.0f;
        for (int part = lane; part < parts; part += 32) most.log = fmaxf(most.log, log2_of_part(log_of(part), most));
        most.log = most_of_warp(most.log);
#if WITH_SINK
        const Sunk row = with_sink(most, p.sink[head]);
        most = row.most;
#endif
        // Without any key there is no maximum; NaN stays NaN.
        if (most.log == -INFINITE) most.log = 0.0f;
        for (int part = lane; part < parts; part += 32) sum += ex2_approx(log2_of_part(log_of(part), most) - most.log);
        sum = total_of_warp(sum);
#if WITH_SINK
        sum += row.own;
#endif
    }
    if (lane == 0) {
        const LogSum total = {most.origin, sum == 0.0f ? -INFINITE : log2f(sum) + most.log};
        store_statistics(p, stats_place(p, span, batch, head, q), true, total, largest,
                         sum == 0.0f ? 0.0f : sum * ex2_approx(most.log - log2_from(most, largest)));
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    unsigned short* const to = output_of(p, span, batch, head, q);
    for (int column = 2 * lane; column < DIM_V; column += 64) {
        float low = 0.0f, high = 0.0f;
        for (int part = 0; part < parts && sum != 0.0f; part++) {
            const float weight = ex2_approx(log2_of_part(log_of(part), most) - most.log) * inverse;
            // What weighs nothing may hold anything.
            if (weight == 0.0f) continue;
            const float* const from = p.part_sums + place(part) * DIM_V + column;
            low += weight * from[0];
            high += weight * from[1];
        }
        store_pair(p, to, column, pack_pair(Element{}, low, high));
    }
}
