// Forward attention: o = softmax(mask(score_mod(q k^T scale))) v, and the logarithm of each row's sum of exponentials.
//
// A threadgroup has BLOCK_Q queries of one head, each simdgroup eight of them; blocks of BLOCK_K keys pass by. Scores, weights and
// the output stay in registers, in f32. The softmax is kept in powers of two.

// Below every score that counts, and far above DROPPED: 2^(DROPPED - LOWEST) is 0. Both are finite, so that nothing here depends
// on how a compiler treats infinities.
#define LOWEST -1e38f
#define DROPPED -3.4e38f
#define LOG2_E 1.44269504088896340736f
#define LN_2 0.69314718055994530942f

kernel void attention_forward(
    const device Element* q [[buffer(0)]],
    const device Element* k [[buffer(1)]],
    const device Element* v [[buffer(2)]],
    device Element* o [[buffer(3)]],
    constant ForwardParams& params [[buffer(4)]],
#if WITH_STATS
    device float* stats [[buffer(5)]],
#endif
#if WITH_SEQ_LEN_Q
    const device int* seq_len_q [[buffer(6)]],
#endif
#if WITH_SEQ_LEN_KV
    const device int* seq_len_kv [[buffer(7)]],
#endif
    CAPTURED_ARGUMENTS
    threadgroup Element* q_tile [[threadgroup(0)]],
    threadgroup Element* kv_tile [[threadgroup(1)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    const int head = int(group.y);
    const int batch = int(group.z);
    const int head_kv = head / params.group;
    const int first = int(group.x) * BLOCK_Q;
    const int last = min(first + BLOCK_Q, params.seq_q) - 1;

    // Queries and keys that lengths leave.
    int queries = params.seq_q;
    int keys = params.seq_kv;
#if WITH_SEQ_LEN_Q
    queries = clamp(seq_len_q[batch], 0, queries);
#endif
#if WITH_SEQ_LEN_KV
    keys = clamp(seq_len_kv[batch], 0, keys);
#endif

    // Keys that any query of the tile may keep.
    int begin = max(0, first + params.lower + 1);
    int end = min(min(keys, last + params.upper + 1), max(last + 1, params.prefix));
    if (first >= queries) {
        end = 0;
    }
    begin -= begin % BLOCK_K;

    const int row = fragment_row(lane);
    const int column = fragment_column(lane);
    const int query = first + int(simdgroup) * 8 + row;

    const device Element* q_rows = q + batch * params.q_strides[0] + head * params.q_strides[1] + first * params.q_strides[2];
    const device Element* k_rows = k + batch * params.k_strides[0] + head_kv * params.k_strides[1];
    const device Element* v_rows = v + batch * params.v_strides[0] + head_kv * params.v_strides[1];
    load_tile<BLOCK_Q, DIM_QK, PADDED_QK, PITCH_QK>(q_tile, q_rows, params.q_strides[2], last + 1 - first, int(thread_index));
    const threadgroup Element* own_q = q_tile + (int(simdgroup) * 8 + row) * PITCH_QK + column;

    float2 sums[PADDED_V / 8];
    for (int d = 0; d < PADDED_V / 8; d++) {
        sums[d] = float2(0.0f);
    }
    float row_max = LOWEST;
    float row_sum = 0.0f;

    for (int start = begin; start < end; start += BLOCK_K) {
        const int present = min(BLOCK_K, keys - start);
        // The values of the block before have been read, and the queries are there.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        load_tile<BLOCK_K, DIM_QK, PADDED_QK, PITCH_QK>(
            kv_tile, k_rows + start * params.k_strides[2], params.k_strides[2], present, int(thread_index));
        threadgroup_barrier(mem_flags::mem_threadgroup);

        float2 scores[BLOCK_K / 8];
        for (int j = 0; j < BLOCK_K / 8; j++) {
            scores[j] = float2(0.0f);
        }
        UNROLL for (int d = 0; d < PADDED_QK; d += 8) {
            const float2 a = float2(float(own_q[d]), float(own_q[d + 1]));
            UNROLL for (int j = 0; j < BLOCK_K / 8; j++) {
                // Transposed: the row of this fragment runs along the dim, its columns are keys.
                const threadgroup Element* key = kv_tile + (j * 8 + column) * PITCH_QK + d + row;
                multiply_add(scores[j], a, float2(float(key[0]), float(key[PITCH_QK])));
            }
        }

        // Whether nothing of this block is dropped by the band or the lengths.
        const bool whole = start - last > params.lower && start + BLOCK_K - 1 - first <= params.upper
            && (start + BLOCK_K - 1 <= first || start + BLOCK_K <= params.prefix) && start + BLOCK_K <= keys
            && first + BLOCK_Q <= queries;
        UNROLL for (int j = 0; j < BLOCK_K / 8; j++) {
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
                    const int distance = key - query;
                    const bool kept = distance > params.lower && distance <= params.upper
                        && (distance <= 0 || key < params.prefix) && key < keys && query < queries;
                    score = kept ? score : DROPPED;
                }
#if WITH_KEEP
                score = keep(at, CAPTURED) ? score : DROPPED;
#endif
                scores[j][e] = score;
            }
        }

        float block_max = row_max;
        UNROLL for (int j = 0; j < BLOCK_K / 8; j++) {
            block_max = max(block_max, max(scores[j][0], scores[j][1]));
        }
        block_max = row_maximum(block_max);
        const float shrink = exp2(row_max - block_max);
        row_max = block_max;
        float block_sum = 0.0f;
        UNROLL for (int j = 0; j < BLOCK_K / 8; j++) {
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
        load_tile<BLOCK_K, DIM_V, PADDED_V, PITCH_V>(
            kv_tile, v_rows + start * params.v_strides[2], params.v_strides[2], present, int(thread_index));
        threadgroup_barrier(mem_flags::mem_threadgroup);
        UNROLL for (int j = 0; j < BLOCK_K / 8; j++) {
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
