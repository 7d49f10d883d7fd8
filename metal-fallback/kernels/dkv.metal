// Computes dK and dV. A threadgroup has OWN keys of one KV head, eight per simdgroup, so that nothing is added across simdgroups. It
// iterates over blocks of PASSING queries, for every head of the GQA group. Scores are transposed: a row is a key.
//
// Wide gradients do not fit the registers: SPLITS threadgroups share the keys, and each writes SLICE_QK columns of dK and SLICE_V of dV.

kernel void attention_dkv(
    const device Element* q [[buffer(0)]],
    const device Element* k [[buffer(1)]],
    const device Element* v [[buffer(2)]],
    const device Element* d_o [[buffer(3)]],
    constant BackwardParams& params [[buffer(4)]],
    const device float* lse [[buffer(5)]],
    QUERY_SPAN_ARGUMENT
    KEY_SPAN_ARGUMENT
    SEQ_LEN_Q_ARGUMENT
    SEQ_LEN_KV_ARGUMENT
    CAPTURED_SCALARS
    const device float* delta [[buffer(9)]],
    device Element* dk [[buffer(10)]],
    device Element* dv [[buffer(11)]],
    CAPTURED_TENSORS
    threadgroup Element* q_tile [[threadgroup(0)]],
    threadgroup Element* d_o_tile [[threadgroup(1)]],
    threadgroup Element* k_tile [[threadgroup(2)]],
    threadgroup Element* v_tile [[threadgroup(3)]],
    ODD_ARGUMENT(4)
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    const int head_kv = int(group.y);
    const int batch = int(group.z);
    const int first = int(group.x) / SPLITS * OWN;
    const int slice_qk = int(group.x) % SPLITS * SLICE_QK;
    const int slice_v = int(group.x) % SPLITS * SLICE_V;
    const Span span_q = QUERY_SPAN;
    const Span span_k = KEY_SPAN;
    const Bounds bounds = BOUNDS;
    const int2 visited = queries_of(bounds, first, min(first + OWN, span_k.rows));

    const int row = fragment_row(lane);
    const int column = fragment_column(lane);
    const int own = int(simdgroup) * 8 + row;
    const int key = first + own;

    const device Element* k_rows = k + span_k.begin * params.k_strides[0] + head_kv * params.k_strides[1] + first * params.k_strides[2];
    const device Element* v_rows = v + span_k.begin * params.v_strides[0] + head_kv * params.v_strides[1] + first * params.v_strides[2];
    const int left = bounds.keys - first;
    load_tile<OWN, DIM_QK, PADDED_QK, PITCH_QK>(k_tile, k_rows, params.k_strides[2], 1, left, int(thread_index));
    load_tile<OWN, DIM_V, PADDED_V, PITCH_V>(v_tile, v_rows, params.v_strides[2], 1, left, int(thread_index));

    float2 dk_sums[SLICE_QK / 8];
    float2 dv_sums[SLICE_V / 8];
    for (int d = 0; d < SLICE_QK / 8; d++) {
        dk_sums[d] = float2(0.0f);
    }
    for (int d = 0; d < SLICE_V / 8; d++) {
        dv_sums[d] = float2(0.0f);
    }
    for (int member = 0; member < params.group; member++) {
        const int head = head_kv * params.group + member;
        const device Element* q_rows = q + span_q.begin * params.q_strides[0] + head * params.q_strides[1];
        const device Element* d_o_rows = d_o + span_q.begin * params.d_o_strides[0] + head * params.d_o_strides[1];
        for (int start = visited.x - visited.x % PASSING; start < visited.y; start += PASSING) {
            const int present = bounds.queries - start;
            // Before the next block of Q and dO is loaded into the tiles, wait until all threads have read the previous block and the keys are in threadgroup memory.
            threadgroup_barrier(mem_flags::mem_threadgroup);
            const bool odd_q = load_tile<PASSING, DIM_QK, PADDED_QK, PITCH_QK>(
                q_tile, q_rows + start * params.q_strides[2], params.q_strides[2], 1, present, int(thread_index));
            const bool odd_d_o = load_tile<PASSING, DIM_V, PADDED_V, PITCH_V>(
                d_o_tile, d_o_rows + start * params.d_o_strides[2], params.d_o_strides[2], params.d_o_strides[3], present,
                int(thread_index));
            const bool own_odd = odd_q || odd_d_o;
            tell_odd(ODD_TOLD, own_odd, simdgroup, lane);
            threadgroup_barrier(mem_flags::mem_threadgroup);

            float2 weights[PASSING / 8];
            float2 slopes[PASSING / 8];
            for (int j = 0; j < PASSING / 8; j++) {
                weights[j] = float2(0.0f);
                slopes[j] = float2(0.0f);
            }
            multiply_transposed<PADDED_QK, PASSING, PITCH_QK>(
                weights, k_tile + own * PITCH_QK + column, q_tile + column * PITCH_QK + row);
            multiply_transposed<PADDED_V, PASSING, PITCH_V>(
                slopes, v_tile + own * PITCH_V + column, d_o_tile + column * PITCH_V + row);
            const bool whole = all_in_bounds(bounds, start, start + PASSING, first, first + OWN);
            uint kept = 0;
            UNROLL for (int j = 0; j < PASSING / 8; j++) {
                UNROLL for (int e = 0; e < 2; e++) {
                    const int query = start + j * 8 + column + e;
                    const Row known = row_of(lse, delta, stats_place(params, span_q, head, query), query < bounds.queries);
                    float weight = weights[j][e];
                    float slope = slopes[j][e];
                    const bool counts = to_weight(
                        weight, slope, known, whole || in_bounds(bounds, query, key), int4(batch, head, query, key),
                        params, CAPTURED);
                    weights[j][e] = weight;
                    slopes[j][e] = slope;
                    kept |= uint(counts) << (j * 2 + e);
                }
            }
            if (any_odd(ODD_TOLD, own_odd)) {
                add_kept_products<SLICE_V, PADDED_V, PITCH_V>(dv_sums, weights, kept, d_o_tile, slice_v, row, column);
                add_kept_products<SLICE_QK, PADDED_QK, PITCH_QK>(dk_sums, slopes, kept, q_tile, slice_qk, row, column);
            } else {
                add_products<SLICE_V, PADDED_V, PITCH_V>(dv_sums, weights, d_o_tile, slice_v, row, column);
                add_products<SLICE_QK, PADDED_QK, PITCH_QK>(dk_sums, slopes, q_tile, slice_qk, row, column);
            }
        }
    }

    if (key >= span_k.rows) {
        return;
    }
    device Element* dk_row = dk + span_k.begin * params.dk_strides[0] + head_kv * params.dk_strides[1] + key * params.dk_strides[2];
    device Element* dv_row = dv + span_k.begin * params.dv_strides[0] + head_kv * params.dv_strides[1] + key * params.dv_strides[2];
    for (int d = 0; d < SLICE_QK; d += 8) {
        for (int e = 0; e < 2; e++) {
            const int at = slice_qk + d + column + e;
            if (at < DIM_QK) {
                dk_row[at] = Element(dk_sums[d / 8][e] * params.scale);
            }
        }
    }
    for (int d = 0; d < SLICE_V; d += 8) {
        for (int e = 0; e < 2; e++) {
            const int at = slice_v + d + column + e;
            if (at < DIM_V) {
                dv_row[at] = Element(dv_sums[d / 8][e]);
            }
        }
    }
}
