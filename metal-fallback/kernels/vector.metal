// Forward attention for few queries. A threadgroup has ROWS queries of the heads of a GQA group. Its simdgroups divide the keys in
// batches of 32; to compute scores, each lane has one key of a batch. Simdgroups share nothing before the end, where their maxima, sums
// and outputs are merged. 
// With many keys (split-KV), PARTS threadgroups have the same queries, each with a part of the keys, and merge.metal merges their
// results.

kernel void attention_vector(
    const device Element* q [[buffer(0)]],
    const device Element* k [[buffer(1)]],
    const device Element* v [[buffer(2)]],
#if PARTS == 1
    device Element* o [[buffer(3)]],
#endif
    constant ForwardParams& params [[buffer(4)]],
#if PARTS == 1 && WITH_STATS
    device float* stats [[buffer(5)]],
#endif
    QUERY_SPAN_ARGUMENT
    KEY_SPAN_ARGUMENT
    SEQ_LEN_Q_ARGUMENT
    SEQ_LEN_KV_ARGUMENT
    CAPTURED_SCALARS
#if PARTS > 1
    device float* part_sums [[buffer(9)]],
    device float* part_outputs [[buffer(10)]],
#endif
#if PARTS == 1 && WITH_SINK
    const device float* sinks [[buffer(11)]],
#endif
#if PARTS == 1 && WITH_ROW_MAX
    device float* row_maxima [[buffer(12)]],
#endif
#if PARTS == 1 && WITH_SUM_EXP
    device float* row_sums [[buffer(13)]],
#endif
    PAGE_TABLE_ARGUMENT
    CAPTURED_TENSORS
    threadgroup float* simd_sums [[threadgroup(0)]],
    threadgroup float* simd_outputs [[threadgroup(1)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    const int head_kv = int(group.y);
    const int batch = int(group.z);
    const int first = int(group.x) / PARTS * ROWS;
    const int part = int(group.x) % PARTS;
    const Span span_q = QUERY_SPAN;
    const Span span_k = KEY_SPAN;
    // A packed sequence may be shorter than the longest one. Nothing is read or written for rows past its end.
    if (first >= span_q.rows * params.group) {
        return;
    }
    const Bounds bounds = BOUNDS;
    const int2 visited = keys_of(bounds, 0, span_q.rows);
    const int part_keys = (span_k.rows - 1) / PARTS + 1;
    const int begin = max(visited.x, part * part_keys);
    const int end = min(visited.y, (part + 1) * part_keys);

    const KeyRows k_rows = KEY_ROWS(k, params.k_strides);
    const KeyRows v_rows = KEY_ROWS(v, params.v_strides);
    float queries[ROWS][LANE_QK];
    float sums[ROWS][LANE_V];
    float row_max[ROWS];
    float row_sum[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) {
        const Query own = query_at(first + r, head_kv, span_q.rows, params.group);
        load_row<DIM_QK, LANE_QK>(
            queries[r], q + span_q.begin * params.q_strides[0] + own.head * params.q_strides[1] + own.query * params.q_strides[2], 1,
            lane);
        clear_row<LANE_V>(sums[r]);
        row_max[r] = LOWEST;
        row_sum[r] = 0.0f;
    }

    for (int start = begin + int(simdgroup) * 32; start < end; start += THREADS) {
        const int present = min(32, end - start);
        float scores[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) {
            scores[r] = 0.0f;
        }
        for (int j = 0; j < present; j++) {
            float key[LANE_QK];
            load_row<DIM_QK, LANE_QK>(key, key_row(k_rows, start + j), 1, lane);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const float product = product_of<LANE_QK>(queries[r], key);
                scores[r] = int(lane) == j ? product : scores[r];
            }
        }
        const int key_at = start + int(lane);
        UNROLL for (int r = 0; r < ROWS; r++) {
            const Query own = query_at(first + r, head_kv, span_q.rows, params.group);
            const bool there = int(lane) < present && in_bounds(bounds, own.query, key_at);
            float score = scores[r];
            const bool kept = to_score(score, there, int4(batch, own.head, own.query, key_at), params, CAPTURED);
            const float batch_max = max(row_max[r], simd_max(score));
            const float shrink = exp_from(row_max[r], batch_max);
            const float weight = kept ? exp_from(score, batch_max) : 0.0f;
            row_max[r] = batch_max;
            row_sum[r] = row_sum[r] * shrink + simd_sum(weight);
            UNROLL for (int i = 0; i < LANE_V; i++) {
                sums[r][i] *= shrink;
            }
#if WITH_DROPOUT
            const float left = left_of(int4(batch, own.head, own.query, key_at), params.heads_q, params.seq_q, CAPTURED);
#else
            const float left = 1.0f;
#endif
            // -1 marks a masked-out key, since no weight is negative.
            scores[r] = kept ? weight * left : -1.0f;
        }
        for (int j = 0; j < present; j++) {
            float value[LANE_V];
            load_row<DIM_V, LANE_V>(value, key_row(v_rows, start + j), 1, lane);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const float weight = simd_shuffle(scores[r], ushort(j));
                // A masked-out key adds nothing, even if its value is NaN.
                if (!(weight < 0.0f)) {
                    add_row<LANE_V>(sums[r], weight, value);
                }
            }
        }
    }

    if (lane == 0) {
        UNROLL for (int r = 0; r < ROWS; r++) {
            simd_sums[(int(simdgroup) * ROWS + r) * 2] = row_max[r];
            simd_sums[(int(simdgroup) * ROWS + r) * 2 + 1] = row_sum[r];
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
        // Wait until all simdgroups have stored their maxima and sums, and the outputs of the row before have been read.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float total_max = LOWEST;
        for (int s = 0; s < THREADS / 32; s++) {
            total_max = max(total_max, simd_sums[(s * ROWS + r) * 2]);
        }
        float total = 0.0f;
        for (int s = 0; s < THREADS / 32; s++) {
            total += simd_sums[(s * ROWS + r) * 2 + 1] * exp_from(simd_sums[(s * ROWS + r) * 2], total_max);
        }
#if PARTS == 1 && WITH_SINK
        // From here on, outputs are relative to the maximum that includes the sink.
        add_sink(total_max, total, sinks[query_at(first + r, head_kv, span_q.rows, params.group).head]);
#endif
        tell_row<DIM_V, LANE_V>(simd_outputs, sums[r], exp_from(row_max[r], total_max), simdgroup, lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (first + r < span_q.rows * params.group) {
            const Query own = query_at(first + r, head_kv, span_q.rows, params.group);
#if PARTS > 1 || WITH_STATS || WITH_ROW_MAX || WITH_SUM_EXP
            const long place = stats_place(params, span_q, own.head, own.query);
#endif
#if PARTS == 1
            device Element* out =
                o + span_q.begin * params.o_strides[0] + own.head * params.o_strides[1] + own.query * params.o_strides[2];
            const float inverse = inverse_of(total);
            for (int d = int(thread_index); d < DIM_V; d += THREADS) {
                out[d] = Element(total_at<DIM_V>(simd_outputs, d) * inverse);
            }
#if WITH_STATS || WITH_ROW_MAX || WITH_SUM_EXP
            if (thread_index == 0) {
#if WITH_STATS
                stats[place] = stats_of(total_max, total);
#endif
#if WITH_ROW_MAX
                row_maxima[place] = row_max_of(total_max, total);
#endif
#if WITH_SUM_EXP
                row_sums[place] = total;
#endif
            }
#endif
#else
            for (int d = int(thread_index); d < DIM_V; d += THREADS) {
                part_outputs[(place * PARTS + part) * DIM_V + d] = total_at<DIM_V>(simd_outputs, d);
            }
            if (thread_index == 0) {
                part_sums[(place * PARTS + part) * 2] = total_max;
                part_sums[(place * PARTS + part) * 2 + 1] = total;
            }
#endif
        }
    }
}
