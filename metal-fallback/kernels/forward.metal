// Forward attention: o = softmax(mask(score_mod(q k^T scale))) v, and the logarithm of each row's sum of exponentials.
//
// A threadgroup has OWN queries of one head, each simdgroup eight of them; blocks of PASSING keys come by. Scores, weights and
// the output stay in registers, in f32. The softmax is kept in powers of two.

kernel void attention_forward(
    const device Element* q [[buffer(0)]],
    const device Element* k [[buffer(1)]],
    const device Element* v [[buffer(2)]],
    device Element* o [[buffer(3)]],
    constant ForwardParams& params [[buffer(4)]],
#if WITH_STATS
    device float* stats [[buffer(5)]],
#endif
    SEQ_LEN_Q_ARGUMENT
    SEQ_LEN_KV_ARGUMENT
    CAPTURED_SCALARS
    CAPTURED_TENSORS
    threadgroup Element* q_tile [[threadgroup(0)]],
    threadgroup Element* kv_tile [[threadgroup(1)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    const int head = int(group.y);
    const int batch = int(group.z);
    const int head_kv = head / params.group;
    const int first = int(group.x) * OWN;
    const int last = min(first + OWN, params.seq_q) - 1;

    const Bounds bounds = BOUNDS;
    const int2 visited = keys_of(bounds, first, last + 1);

    const int row = fragment_row(lane);
    const int column = fragment_column(lane);
    const int query = first + int(simdgroup) * 8 + row;

    const device Element* q_rows = q + batch * params.q_strides[0] + head * params.q_strides[1] + first * params.q_strides[2];
    const device Element* k_rows = k + batch * params.k_strides[0] + head_kv * params.k_strides[1];
    const device Element* v_rows = v + batch * params.v_strides[0] + head_kv * params.v_strides[1];
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
        // The values of the block before have been read, and the queries are there.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        load_tile<PASSING, DIM_QK, PADDED_QK, PITCH_QK>(
            kv_tile, k_rows + start * params.k_strides[2], params.k_strides[2], 1, present, int(thread_index));
        threadgroup_barrier(mem_flags::mem_threadgroup);

        float2 scores[PASSING / 8];
        for (int j = 0; j < PASSING / 8; j++) {
            scores[j] = float2(0.0f);
        }
        multiply_transposed<PADDED_QK, PASSING, PITCH_QK>(scores, own_q, kv_tile + column * PITCH_QK + row);

        // Whether nothing of this block is dropped by the band or the lengths.
        const bool whole = all_in_bounds(bounds, first, first + OWN, start, start + PASSING);
        UNROLL for (int j = 0; j < PASSING / 8; j++) {
            UNROLL for (int e = 0; e < 2; e++) {
                const int key = start + j * 8 + column + e;
                float score = scores[j][e] * params.scale;
#if WITH_SCORE_MOD || WITH_KEEP
                // Tensors have no elements past the ends.
                const Place at = {batch, head, min(query, params.seq_q - 1), min(key, params.seq_kv - 1)};
#endif
#if WITH_SCORE_MOD
                score = score_mod(score, at, CAPTURED) * LOG2_E;
#endif
                if (!whole) {
                    score = in_bounds(bounds, query, key) ? score : DROPPED;
                }
#if WITH_KEEP
                score = keep(at, CAPTURED) ? score : DROPPED;
#endif
                scores[j][e] = score;
            }
        }

        float block_max = row_max;
        UNROLL for (int j = 0; j < PASSING / 8; j++) {
            block_max = max(block_max, max(scores[j][0], scores[j][1]));
        }
        block_max = row_maximum(block_max);
        const float shrink = exp2(row_max - block_max);
        row_max = block_max;
        float block_sum = 0.0f;
        UNROLL for (int j = 0; j < PASSING / 8; j++) {
            scores[j][0] = exp2(scores[j][0] - row_max);
            scores[j][1] = exp2(scores[j][1] - row_max);
            block_sum += scores[j][0] + scores[j][1];
        }
        row_sum = row_sum * shrink + row_total(block_sum);
        UNROLL for (int d = 0; d < PADDED_V / 8; d++) {
            sums[d] *= shrink;
        }

        // The keys have been read.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        load_tile<PASSING, DIM_V, PADDED_V, PITCH_V>(
            kv_tile, v_rows + start * params.v_strides[2], params.v_strides[2], 1, present, int(thread_index));
        threadgroup_barrier(mem_flags::mem_threadgroup);
        UNROLL for (int j = 0; j < PASSING / 8; j++) {
            UNROLL for (int d = 0; d < PADDED_V; d += 8) {
                const threadgroup Element* value = kv_tile + (j * 8 + row) * PITCH_V + d + column;
                multiply_add(sums[d / 8], scores[j], float2(float(value[0]), float(value[1])));
            }
        }
    }

    if (query >= params.seq_q) {
        return;
    }
    // Only a row without keys has the sum 0; one with a NaN keeps it.
    const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
    device Element* out = o + batch * params.o_strides[0] + head * params.o_strides[1] + query * params.o_strides[2];
    for (int d = 0; d < PADDED_V; d += 8) {
        for (int e = 0; e < 2; e++) {
            if (d + column + e < DIM_V) {
                out[d + column + e] = Element(sums[d / 8][e] * inverse);
            }
        }
    }
#if WITH_STATS
    if (column == 0) {
        const float minus_infinity = as_type<float>(0xff800000u);
        const long place = (long(batch) * params.heads_q + head) * params.seq_q + query;
        stats[place] = row_sum == 0.0f ? minus_infinity : (row_max + log2(row_sum)) * LN_2;
    }
#endif
}
