// Forward attention: o = softmax(mask(score_mod(q k^T scale))) v. If requested, also writes for each row the logarithm of its sum of
// exponentials, that sum, and the largest score.
//
// A threadgroup has OWN queries of one head, eight per simdgroup, and iterates over blocks of PASSING keys. Scores, P and the output stay
// in registers, in f32.

kernel void attention_forward(
    const device Element* q [[buffer(0)]],
    const device Element* k [[buffer(1)]],
    const device Element* v [[buffer(2)]],
    device Element* o [[buffer(3)]],
    constant ForwardParams& params [[buffer(4)]],
#if WITH_STATS
    device float* stats [[buffer(5)]],
#endif
    QUERY_SPAN_ARGUMENT
    KEY_SPAN_ARGUMENT
    SEQ_LEN_Q_ARGUMENT
    SEQ_LEN_KV_ARGUMENT
    CAPTURED_SCALARS
#if WITH_SINK
    const device float* sinks [[buffer(11)]],
#endif
#if WITH_ROW_MAX
    device float* row_maxima [[buffer(12)]],
#endif
#if WITH_SUM_EXP
    device float* row_sums [[buffer(13)]],
#endif
    PAGE_TABLE_ARGUMENT
    CAPTURED_TENSORS
    threadgroup Element* q_tile [[threadgroup(0)]],
    threadgroup Element* kv_tile [[threadgroup(1)]],
    ODD_ARGUMENT(2)
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    const int head = int(group.y);
    const int batch = int(group.z);
    const int head_kv = head / params.group;
    const int first = int(group.x) * OWN;
    const Span span_q = QUERY_SPAN;
    const Span span_k = KEY_SPAN;
    const Bounds bounds = BOUNDS;
    const int last = min(first + OWN, span_q.rows) - 1;
    const int2 visited = keys_of(bounds, first, last + 1);

    const int row = fragment_row(lane);
    const int column = fragment_column(lane);
    const int query = first + int(simdgroup) * 8 + row;

    const device Element* q_rows = q + span_q.begin * params.q_strides[0] + head * params.q_strides[1] + first * params.q_strides[2];
    const KeyRows k_rows = KEY_ROWS(k, params.k_strides);
    const KeyRows v_rows = KEY_ROWS(v, params.v_strides);
    load_tile<OWN, DIM_QK, PADDED_QK, PITCH_QK>(q_tile, q_rows, params.q_strides[2], 1, last + 1 - first, int(thread_index));
    const threadgroup Element* own_q = q_tile + (int(simdgroup) * 8 + row) * PITCH_QK + column;

    float2 sums[PADDED_V / 8];
    for (int d = 0; d < PADDED_V / 8; d++) {
        sums[d] = float2(0.0f);
    }
    float row_max = LOWEST;
    float row_sum = 0.0f;

    for (int start = visited.x - visited.x % PASSING; start < visited.y; start += PASSING) {
        const int present = min(PASSING, bounds.keys - start);
        // Wait until all threads have read the values of the block before in kv_tile, and the queries are there.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        load_keys<PASSING, DIM_QK, PADDED_QK, PITCH_QK>(kv_tile, k_rows, start, present, int(thread_index));
        threadgroup_barrier(mem_flags::mem_threadgroup);

        float2 scores[PASSING / 8];
        for (int j = 0; j < PASSING / 8; j++) {
            scores[j] = float2(0.0f);
        }
        multiply_transposed<PADDED_QK, PASSING, PITCH_QK>(scores, own_q, kv_tile + column * PITCH_QK + row);

        // True if band, prefix and lengths mask out no pair of this block.
        const bool whole = all_in_bounds(bounds, first, first + OWN, start, start + PASSING);
        uint kept = 0;
        UNROLL for (int j = 0; j < PASSING / 8; j++) {
            UNROLL for (int e = 0; e < 2; e++) {
                const int key = start + j * 8 + column + e;
                const bool there = whole || in_bounds(bounds, query, key);
                float score = scores[j][e];
                const bool counts = to_score(score, there, int4(batch, head, query, key), params, CAPTURED);
                kept |= uint(counts) << (j * 2 + e);
                scores[j][e] = score;
            }
        }

        float block_max = row_max;
        UNROLL for (int j = 0; j < PASSING / 8; j++) {
            block_max = max(block_max, max(scores[j][0], scores[j][1]));
        }
        block_max = row_maximum(block_max);
        const float shrink = exp_from(row_max, block_max);
        row_max = block_max;
        float block_sum = 0.0f;
        UNROLL for (int j = 0; j < PASSING / 8; j++) {
            UNROLL for (int e = 0; e < 2; e++) {
                scores[j][e] = (kept >> (j * 2 + e) & 1u) != 0 ? exp_from(scores[j][e], row_max) : 0.0f;
            }
            block_sum += scores[j][0] + scores[j][1];
        }
        row_sum = row_sum * shrink + row_total(block_sum);
#if WITH_DROPOUT
        UNROLL for (int j = 0; j < PASSING / 8; j++) {
            UNROLL for (int e = 0; e < 2; e++) {
                scores[j][e] *= left_of(int4(batch, head, query, start + j * 8 + column + e), params.heads_q, params.seq_q, CAPTURED);
            }
        }
#endif
        UNROLL for (int d = 0; d < PADDED_V / 8; d++) {
            sums[d] *= shrink;
        }

        // Before V is loaded into kv_tile, wait until all threads have read the keys.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const bool own_odd = load_keys<PASSING, DIM_V, PADDED_V, PITCH_V>(kv_tile, v_rows, start, present, int(thread_index));
        tell_odd(ODD_TOLD, own_odd, simdgroup, lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (any_odd(ODD_TOLD, own_odd)) {
            add_kept_products<PADDED_V, PADDED_V, PITCH_V>(sums, scores, kept, kv_tile, 0, row, column);
        } else {
            add_products<PADDED_V, PADDED_V, PITCH_V>(sums, scores, kv_tile, 0, row, column);
        }
    }

    if (query >= span_q.rows) {
        return;
    }
#if WITH_SINK
    const float shrink = add_sink(row_max, row_sum, sinks[head]);
    const float inverse = shrink * inverse_of(row_sum);
#else
    const float inverse = inverse_of(row_sum);
#endif
    device Element* out = o + span_q.begin * params.o_strides[0] + head * params.o_strides[1] + query * params.o_strides[2];
    for (int d = 0; d < PADDED_V; d += 8) {
        for (int e = 0; e < 2; e++) {
            if (d + column + e < DIM_V) {
                out[d + column + e] = Element(sums[d / 8][e] * inverse);
            }
        }
    }
#if WITH_STATS || WITH_ROW_MAX || WITH_SUM_EXP
    if (column == 0) {
        const long place = stats_place(params, span_q, head, query);
#if WITH_STATS
        stats[place] = stats_of(row_max, row_sum);
#endif
#if WITH_ROW_MAX
        row_maxima[place] = row_max_of(row_max, row_sum);
#endif
#if WITH_SUM_EXP
        row_sums[place] = row_sum;
#endif
    }
#endif
}
