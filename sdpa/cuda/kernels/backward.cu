// Attention backward on compute capability 9.0: one group of threads brings operands, two others have 64 keys of a block each, and walk over queries.
// Scores lie transposed, keys beside queries, so that weights and gradients of scores are operands as they are.

// Products of 64 rows and 64 rows of a tile of queries, over the columns of both. Nothing waits.
template <int panels>
inline void score(float (&s)[SCORES], uint rows, uint tile) {
    const ulong64 a = operand_by_rows(rows), b = operand_by_rows(tile);
    products_begin();
#pragma unroll
    for (int panel = 0; panel < panels; panel++) {
#pragma unroll
        for (int step = 0; step < 4; step++) {
            product_by_rows(s, further(a, panel * KV_PANEL_BYTES + step * 32), further(b, panel * Q_PANEL_BYTES + step * 32), panel + step > 0);
        }
    }
    products_commit();
}

// Adds weights times 64 rows of a tile of queries. Nothing waits: weights are untouchable until then.
template <int count>
inline void weigh(float (&sums)[count], const uint (&w)[SCORES / 2], uint tile) {
    const ulong64 b = operand_by_columns(tile, Q_PANEL_BYTES);
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; step++) {
        product_by_columns(sums, w[4 * step], w[4 * step + 1], w[4 * step + 2], w[4 * step + 3], further(b, step * 16 * ROW_BYTES), true);
    }
    products_commit();
}

// Gradients of 64 queries along a panel of columns, from gradients of the block's scores. Nothing waits.
inline void along_queries(float (&sums)[DQ], uint d_s, uint k) {
    const ulong64 a = operand_by_columns(d_s, KV_PANEL_BYTES), b = operand_by_columns(k, KV_PANEL_BYTES);
    products_begin();
#pragma unroll
    for (int step = 0; step < TILE_N / 16; step++) {
        product_of_columns(sums, further(a, step * 16 * ROW_BYTES), further(b, step * 16 * ROW_BYTES), step > 0);
    }
    products_commit();
}

inline void pack(uint (&w)[SCORES / 2], const float (&s)[SCORES]) {
#pragma unroll
    for (int n = 0; n < SCORES / 2; n++) w[n] = pair_of(Element{}, s[2 * n], s[2 * n + 1]);
}

// Which weights of a thread stay, a bit for each.
inline uint stay_of(const Params& p, const Corner& corner) {
    uint bits = 0;
#if WITH_DROPOUT
    each_of_keys<SCORES>(p, corner.batch, corner.head, corner.q, corner.k, [&](int n, bool stays) { bits |= uint(stays) << n; });
#endif
    return bits;
}

// A weight as dropout leaves it, without its scale, and its gradient before dropout.
inline float left_of(float weight, uint stay, int n) {
    return !WITH_DROPOUT || (stay >> n & 1) ? weight : 0.0f;
}

inline float through_dropout(const Params& p, float d_p, uint stay, int n) {
#if WITH_DROPOUT
    return stay >> n & 1 ? d_p * p.dropout_scale : 0.0f;
#else
    return d_p;
#endif
}

// Weights of scores, rounded in `w`, as dropout leaves them. In `s`, times the slope of the score_mod: what gradients of scores are multiples of. Where gradients of parameters
// are asked for, weights as they are, and scores before the score_mod in `raw`.
template <bool masked>
inline void weights(float (&s)[SCORES], float (&raw)[RAW], uint (&w)[SCORES / 2], const Params& p, const Captured& captured, const Corner& corner,
                    uint lse, uint stay) {
    // Without a score_mod the scale is a part of the unit.
    const float factor = WITH_SCORE_MOD || p.natural == 0 ? p.unit : p.unit * p.scale;
#pragma unroll
    for (int n = 0; n < SCORES; n += 2) {
        float before[2], weight[2];
        const float2 of = load_shared_pair(lse + n / 4 * 32);
#pragma unroll
        for (int other = 0; other < 2; other++) {
            before[other] = WITH_SCORE_MOD || (WITH_ALONG && p.natural != 0) ? s[n + other] * p.scale : s[n + other];
            float x = WITH_SCORE_MOD ? before[other] : s[n + other];
#if WITH_SCORE_MOD
            x = score_mod(x, place_of(p, corner, n + other), captured);
#endif
            x = x * factor - (other ? of.y : of.x);
#if WITH_KEEP
            if (masked && !keep(place_of(p, corner, n + other), captured)) x = -INFINITE;
#endif
            // Made again for each, so that registers are not held.
            if (masked && !kept_by(p, span_of(p, corner.batch), corner.k + (n & 2 ? 8 : 0)).holds(corner.q + 8 * (n / 4) + other)) x = -INFINITE;
            weight[other] = exp2_of(x);
        }
        w[n / 2] = pair_of(Element{}, left_of(weight[0], stay, n), left_of(weight[1], stay, n + 1));
#pragma unroll
        for (int other = 0; other < 2; other++) {
#if WITH_ALONG
            raw[n + other] = before[other];
#elif WITH_SCORE_MOD
            // What has no weight has no gradient, however steep the score_mod is. Computed all the same: scores that branch apart wait for one another.
            const float slope = score_mod_gradient(before[other], weight[other], place_of(p, corner, n + other), captured);
            weight[other] = weight[other] == 0.0f ? 0.0f : slope;
#endif
            s[n + other] = weight[other];
        }
    }
}

// Gradients of scores, in place of those of weights: 0 where there is no weight, whatever a value that is dropped holds.
template <bool masked>
inline void slopes(float (&s)[SCORES], const float (&raw)[RAW], float (&d_p)[SCORES], const Params& p, const Captured& captured,
                   const Gradients& gradients, const Corner& corner, uint delta, uint stay) {
#pragma unroll
    for (int n = 0; n < SCORES; n += 2) {
        const float2 of = load_shared_pair(delta + n / 4 * 32);
        d_p[n] = masked && s[n] == 0.0f ? 0.0f : s[n] * (through_dropout(p, d_p[n], stay, n) - of.x);
        d_p[n + 1] = masked && s[n + 1] == 0.0f ? 0.0f : s[n + 1] * (through_dropout(p, d_p[n + 1], stay, n + 1) - of.y);
    }
#if WITH_ALONG
    along_parameters(raw, d_p, p, captured, gradients, corner);
#if WITH_SCORE_MOD
#pragma unroll
    for (int n = 0; n < SCORES; n++) {
        if (d_p[n] != 0.0f) d_p[n] = score_mod_gradient(raw[n], d_p[n], place_of(p, corner, n), captured);
    }
#endif
#endif
}

// Gradients of values are there, with so many products under way, and what they were made of is let go.
template <int under_way>
inline void values_end(float (&dv)[DV], uint d_o_free) {
    products_wait<under_way>();
    hold(dv);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(d_o_free);
}

struct Shared {
    uint k, v, q, d_o, d_s, lse, delta;
    uint kv_full, q_full, q_free, d_o_full, d_o_free;
};

inline Shared layout(uint base) {
    Shared at;
    at.k = base;
    at.v = at.k + K_BYTES;
    at.q = at.v + V_BYTES;
    at.d_o = at.q + STAGES * Q_BYTES;
    at.d_s = at.d_o + STAGES * D_O_BYTES;
    at.lse = at.d_s + 2 * D_S_BYTES;
    at.delta = at.lse + STAGES * ROWS_BYTES;
    at.kv_full = at.delta + STAGES * ROWS_BYTES;
    at.q_full = at.kv_full + 8;
    at.q_free = at.q_full + 8 * STAGES;
    at.d_o_full = at.q_free + 8 * STAGES;
    at.d_o_free = at.d_o_full + 8 * STAGES;
    return at;
}

// Key heads whose queries fit the cache together follow one another; of these, blocks of the first keys come first: causal masks leave them the most.
inline Tile tile_of(const Params& p, int number) {
    const int part = number % PARTS, of = number / PARTS;
    const int heads_kv = p.heads_q / p.group, heads = p.batch * heads_kv;
    const int first = of / (p.section * p.blocks) * p.section, together = min(p.section, heads - first);
    const int in_section = of - first * p.blocks;
    const int both = first + in_section % together;
    return Tile{in_section / together, both / heads_kv, both % heads_kv, part};
}

// Where a ring of barriers stands: which of them, and which of its phases.
struct Ring {
    int stage = 0, phase = 0;
    inline void on() {
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        phase ^= stage == 0;
    }
};

inline void panels_in(uint to, uint panel_bytes, int panels, const TensorMap& map, uint barrier, int row, int head, int batch) {
    for (int panel = 0; panel < panels; panel++) copy_in(to + panel * panel_bytes, map, barrier, panel * PANEL, row, head, batch);
}

#if WITH_PACKED_Q || WITH_PACKED_KV
inline void packed_panels_in(uint to, uint panel_bytes, int panels, int of_tensor, const TensorMap& map, uint barrier, const Clipped& rows,
                             int head) {
    for (int panel = 0; panel < panels; panel++)
        panel_in(to + panel * panel_bytes, panel_bytes, map, barrier, panel * PANEL, panel < of_tensor, rows, head);
}
#endif

// Brings rows of queries, of keys too, as many as a tile or block has; so many of the panels are the tensor's.
template <int rows, int panels, int of_tensor>
inline void queries_in(uint to, const TensorMap& map, uint barrier, const Span& span, int tile, int head, int batch) {
#if WITH_PACKED_Q
    const Clipped cut = clipped<rows>(span.begin_q, span.len_q, tile * rows);
    packed_panels_in(to, rows * ROW_BYTES, panels, of_tensor, map, barrier, cut, head);
#else
    panels_in(to, rows * ROW_BYTES, panels, map, barrier, tile * rows, head, batch);
#endif
}

template <int rows, int panels, int of_tensor>
inline void keys_in(uint to, const TensorMap& map, uint barrier, const Span& span, int block, int head, int batch) {
#if WITH_PACKED_KV
    const Clipped cut = clipped<rows>(span.begin_kv, span.len_kv, block * rows);
    packed_panels_in(to, rows * ROW_BYTES, panels, of_tensor, map, barrier, cut, head);
#else
    panels_in(to, rows * ROW_BYTES, panels, map, barrier, block * rows, head, batch);
#endif
}

// Brings the block's keys and values, and tile after tile of queries and of gradients of outputs, of all heads that share the key head.
inline void bring(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const TensorMap& d_o_map, const Params& p,
                  const Shared& at, const Tile& tile) {
    Ring ring;
    const Span span = span_of(p, tile.batch);
    const Reach reach = reach_of(p, span, tile.block);
    bool first = true;
    for (int of = 0; of < p.group; of++) {
        const int head = tile.head * p.group + of;
        Walk walk = walk_of(p, reach, tile.batch, head, tile.block);
        int queries;
        bool partly;
        while (walk_on(walk, p, reach, queries, partly)) {
            if (first) {
                barrier_expect(at.kv_full, K_BYTES + V_BYTES);
                keys_in<TILE_N, QK_PANELS, QK_THERE>(at.k, k_map, at.kv_full, span, tile.block, tile.head, tile.batch);
                keys_in<TILE_N, V_PANELS, V_THERE>(at.v, v_map, at.kv_full, span, tile.block, tile.head, tile.batch);
                first = false;
            }
            const long rows = tile_place(p, span, tile.batch, head, queries) * TILE_M;
            // Done with first, so asked for first.
            barrier_wait(at.d_o_free + 8 * ring.stage, ring.phase ^ 1);
            barrier_expect(at.d_o_full + 8 * ring.stage, D_O_BYTES + ROWS_BYTES);
            copy_row_in(at.delta + ring.stage * ROWS_BYTES, p.delta + rows, ROWS_BYTES, at.d_o_full + 8 * ring.stage);
            queries_in<TILE_M, V_PANELS, V_THERE>(at.d_o + ring.stage * D_O_BYTES, d_o_map, at.d_o_full + 8 * ring.stage, span, queries, head,
                                                  tile.batch);
            barrier_wait(at.q_free + 8 * ring.stage, ring.phase ^ 1);
            barrier_expect(at.q_full + 8 * ring.stage, Q_BYTES + ROWS_BYTES);
            copy_row_in(at.lse + ring.stage * ROWS_BYTES, p.lse + rows, ROWS_BYTES, at.q_full + 8 * ring.stage);
            queries_in<TILE_M, QK_PANELS, QK_THERE>(at.q + ring.stage * Q_BYTES, q_map, at.q_full + 8 * ring.stage, span, queries, head,
                                                    tile.batch);
            ring.on();
        }
    }
}

// The rows of a warp to shared memory, and from there to their tensor.
template <int count>
inline void take_out(const float (&sums)[count], float scale, uint rows_at, const TensorMap& map, int panels, int first_panel, int first_row,
                     const Span& span, const Tile& tile) {
    const int lane = threadIdx.x & 31, in_warp = lane / 4;
#pragma unroll
    for (int n = 0; n < count; n += 2) {
        const int half = n >> 1 & 1, chunk = n / 4;
        const uint to = rows_at + chunk / 8 * KV_PANEL_BYTES + (in_warp + 8 * half) * ROW_BYTES + ((chunk % 8 ^ in_warp) << 4) + (lane & 3) * 4;
        store_shared(to, pair_of(Element{}, sums[n] * scale, sums[n + 1] * scale));
    }
    written_for_engines();
    __syncwarp();
    if (lane == 0) {
        for (int panel = 0; panel < count * 2 / PANEL; panel++) {
            const uint from = rows_at + panel * KV_PANEL_BYTES;
            const int column = (first_panel + panel) * PANEL;
#if WITH_PACKED_KV
            const Clipped cut = clipped<16>(span.begin_kv, span.len_kv, first_row);
            if (first_row < span.len_kv && first_panel + panel < panels) copy_out(from, map, column, cut.skipped, tile.head, cut.end);
#else
            copy_out(from, map, column, first_row, tile.head, tile.batch);
#endif
        }
        copy_out_ends();
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_backward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                       const __grid_constant__ TensorMap d_o_map, const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
                       const __grid_constant__ Params p, const __grid_constant__ Captured captured, const __grid_constant__ Gradients gradients) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Shared at = layout(shared_address(memory));
    if (threadIdx.x == 0) {
        barrier_init(at.kv_full, 1);
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(at.q_full + 8 * stage, 1);
            barrier_init(at.d_o_full + 8 * stage, 1);
            barrier_init(at.q_free + 8 * stage, WARPS);
            barrier_init(at.d_o_free + 8 * stage, WARPS);
        }
        barrier_made();
    }
    __syncthreads();
    const Tile tile = tile_of(p, blockIdx.x);
#if WITH_PACKED_KV
    // Blocks are as many as the longest document may have.
    if (tile.block * TILE_N >= span_of(p, tile.batch).len_kv) return;
#endif
    if (threadIdx.x < 128) {
        fewer_registers<BRING_REGISTERS>();
        if (threadIdx.x == 0) bring(q_map, k_map, v_map, d_o_map, p, at, tile);
        return;
    }
    more_registers<GROUP_REGISTERS>();
    const int group = alike(int(threadIdx.x >> 7)) - 1, lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    const uint own_rows = group * 64 * ROW_BYTES;
    // Of gradients of queries, a group has its half of the rows or its panel of the columns.
    const uint own_d_s = TILE_M == 128 ? group * KV_PANEL_BYTES : 0, own_k = TILE_M == 128 ? 0 : (tile.part * 2 + group) * KV_PANEL_BYTES;
    const Span span = span_of(p, tile.batch);
    const Reach reach = reach_of(p, span, tile.block);
    Ring ring;
    int turn = 0;
    float dk[DK], dv[DV];
#pragma unroll
    for (int n = 0; n < DK; n++) dk[n] = 0.0f;
#pragma unroll
    for (int n = 0; n < DV; n++) dv[n] = 0.0f;
    for (int of = 0; of < p.group; of++) {
        const int head = tile.head * p.group + of;
        Walk walk = walk_of(p, reach, tile.batch, head, tile.block);
        int queries;
        bool partly;
        while (walk_on(walk, p, reach, queries, partly)) {
            const long head_rows = tile_place(p, span, tile.batch, head, queries);
            const uint q = at.q + ring.stage * Q_BYTES, d_o = at.d_o + ring.stage * D_O_BYTES, d_s = at.d_s + turn * D_S_BYTES;
            barrier_wait(at.kv_full, 0);
            barrier_wait(at.q_full + 8 * ring.stage, ring.phase);
            float dq[DQ];
#pragma unroll
            for (int sub = 0; sub < SUBS; sub++) {
                const Corner corner = {tile.batch, head, queries * TILE_M + sub * 64 + 2 * (lane & 3),
                                       tile.block * TILE_N + group * 64 + warp * 16 + lane / 4};
                const uint sub_rows = sub * 64 * ROW_BYTES, of_rows = ring.stage * ROWS_BYTES + sub * 64 * 4 + 8 * (lane & 3);
                float s[SCORES], d_p[SCORES], raw[RAW];
                uint w[SCORES / 2], d_w[SCORES / 2];
                // Before there are scores in registers.
                const uint stay = stay_of(p, corner);
                score<QK_PANELS>(s, at.k + own_rows, q + sub_rows);
                if (sub == 0) barrier_wait(at.d_o_full + 8 * ring.stage, ring.phase);
                score<V_PANELS>(d_p, at.v + own_rows, d_o + sub_rows);
                products_wait<1>();
                hold(s);
                if (MASKED_ANYWHERE || partly) weights<true>(s, raw, w, p, captured, corner, at.lse + of_rows, stay);
                else weights<false>(s, raw, w, p, captured, corner, at.lse + of_rows, stay);
                products_wait<0>();
                hold(d_p);
                // With one stage, in time for the next gradients of outputs to come; otherwise as late as registers are free.
                if (STAGES == 1) weigh(dv, w, d_o + sub_rows + tile.part * DV_PANELS * Q_PANEL_BYTES);
                if (MASKED_ANYWHERE || WITH_SCORE_MOD || partly) slopes<true>(s, raw, d_p, p, captured, gradients, corner, at.delta + of_rows, stay);
                else slopes<false>(s, raw, d_p, p, captured, gradients, corner, at.delta + of_rows, stay);
                pack(d_w, d_p);
                // Keys are rows there, 64 queries a panel.
                const uint d_s_at = d_s + sub * KV_PANEL_BYTES + own_rows + (warp * 16 + lane / 4) * ROW_BYTES + (lane & 3) * 4;
#pragma unroll
                for (int n = 0; n < SCORES / 2; n++) store_shared(d_s_at + (n & 1 ? 8 * ROW_BYTES : 0) + ((n / 2 ^ lane / 4) << 4), d_w[n]);
                written_for_engines();
                if (STAGES > 1) weigh(dv, w, d_o + sub_rows + tile.part * DV_PANELS * Q_PANEL_BYTES);
                if (sub + 1 == SUBS) {
                    if (STAGES == 1) values_end<0>(dv, at.d_o_free);
                    meet(1, 256);
                    along_queries(dq, d_s + own_d_s, at.k + own_k);
                    if (STAGES > 1) values_end<1>(dv, at.d_o_free + 8 * ring.stage);
                }
                weigh(dk, d_w, q + sub_rows + tile.part * DK_PANELS * Q_PANEL_BYTES);
            }
            products_wait<1>();
            hold(dq);
            float* to = p.sums + (head_rows * SLICES + tile.part * 2 + group) * 4096 + (threadIdx.x & 127) * 4;
#pragma unroll
            for (int n = 0; n < DQ; n += 4) add_four(to + n * 128, dq[n], dq[n + 1], dq[n + 2], dq[n + 3]);
            products_wait<0>();
            hold(dk);
            __syncwarp();
            if (lane == 0) barrier_arrive(at.q_free + 8 * ring.stage);
            ring.on();
            turn ^= 1;
        }
    }
    // Both groups are done with the keys.
    meet(1, 256);
    const uint rows_at = own_rows + warp * 16 * ROW_BYTES;
    const int first_row = tile.block * TILE_N + group * 64 + warp * 16;
    take_out(dk, p.scale, at.k + rows_at, dk_map, QK_THERE, tile.part * DK_PANELS, first_row, span, tile);
    take_out(dv, WITH_DROPOUT ? p.dropout_scale : 1.0f, at.v + rows_at, dv_map, V_THERE, tile.part * DV_PANELS, first_row, span, tile);
    if (lane == 0) copied_out();
}
