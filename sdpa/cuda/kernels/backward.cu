// Attention backward on compute capability 9.0: one group of threads brings operands and takes sums out, two others have 64 keys of a block each, and walk
// over queries. Scores lie transposed, keys beside queries, so that weights and gradients of scores are operands as they are.

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

// The two numbers of each pair of queries that a thread has scores of.
inline void pairs_of(float2 (&x)[PAIRS], uint at) {
#pragma unroll
    for (int n = 0; n < PAIRS; n++) x[n] = load_shared_pair(at + n * 32);
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
                    const float2 (&lse)[PAIRS], uint stay) {
    // Without a score_mod the scale is a part of the unit.
    const float factor = WITH_SCORE_MOD || p.natural == 0 ? p.unit : p.unit * p.scale;
#pragma unroll
    for (int n = 0; n < SCORES; n += 2) {
        float before[2], weight[2];
        const float2 of = lse[n / 4];
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
                   const Gradients& gradients, const Corner& corner, const float2 (&delta)[PAIRS], uint stay) {
#pragma unroll
    for (int n = 0; n < SCORES; n += 2) {
        const float2 of = delta[n / 4];
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
    uint k, v, q, d_o, d_s, sums, lse, delta;
    uint kv_full, q_full, q_free, d_o_full, d_o_free;
};

inline Shared layout(uint base) {
    Shared at;
    at.k = base;
    at.v = at.k + K_BYTES;
    at.q = at.v + V_BYTES;
    at.d_o = at.q + STAGES * Q_BYTES;
    at.d_s = at.d_o + STAGES * D_O_BYTES;
    at.sums = at.d_s + 2 * D_S_BYTES;
    at.lse = at.sums + 2 * SUMS_BYTES;
    at.delta = at.lse + STAGES * ROWS_BYTES;
    at.kv_full = at.delta + STAGES * ROWS_BYTES;
    at.q_full = at.kv_full + 8;
    at.q_free = at.q_full + 8 * STAGES;
    at.d_o_full = at.q_free + 8 * STAGES;
    at.d_o_free = at.d_o_full + 8 * STAGES;
    return at;
}

// Which block of keys, of which key head and part of the columns: those that share one follow one another.
inline int number_of(const Params& p) {
    return WITH_SHARES ? blockIdx.x / p.shares : blockIdx.x;
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
    const Heads heads = heads_of(p);
    bool first = true;
    for (int of = heads.first; of < heads.past; of++) {
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

// Where a group's slice of the gradients of a step's queries is added to.
inline float* slice_of(const Params& p, const Span& span, const Tile& tile, const Step& step, int group) {
    return p.sums + (tile_place(p, span, tile.batch, step.head, step.queries) * SLICES + tile.part * 2 + group) * SLICE;
}

#if SUMS_BY_COPY
// A warp of its own: the copy engine adds what each group has left in shared memory, beside what the group does next.
inline void take_sums(const Params& p, const Shared& at, const Tile& tile) {
    const Span span = span_of(p, tile.batch);
    const Reach reach = reach_of(p, span, tile.block);
    Steps steps = steps_of(p, reach, tile);
    Step step;
    const bool first = threadIdx.x == 32;
    while (step_on(steps, p, reach, tile, step)) {
        // The first group's has been read, then the second's.
        if (first) copied_out<1>();
        __syncwarp();
        arrive(SUMS_FREE, 160);
        if (first) copied_out();
        __syncwarp();
        arrive(SUMS_FREE + 1, 160);
        for (int group = 0; group < 2; group++) {
            meet(SUMS_THERE + group, 160);
            if (first) {
                add_out(slice_of(p, span, tile, step, group), at.sums + group * SUMS_BYTES, SUMS_BYTES);
                copy_out_ends();
            }
        }
    }
    if (first) copied_out();
}

// A group leaves its slice for that warp, in the order in which its threads have it. Its number is asked for once more: as it is, it would take a place that
// the operands of products need.
inline void leave_sums(const float (&sums)[DQ], float*, uint at) {
    const int group = alike(int(threadIdx.x >> 7)) - 1;
    meet(SUMS_FREE + group, 160);
    at += group * SUMS_BYTES + (threadIdx.x & 127) * 16;
#pragma unroll
    for (int n = 0; n < DQ; n += 4) store_shared_numbers(at + n * 512, sums[n], sums[n + 1], sums[n + 2], sums[n + 3]);
    written_for_engines();
    arrive(SUMS_THERE + group, 160);
}
#else
// A group adds its slice, four numbers at once. One address, told to the compiler, and distances from it.
inline void leave_sums(const float (&sums)[DQ], float* to, uint) {
    to = kept(to + (threadIdx.x & 127) * 4);
#pragma unroll
    for (int n = 0; n < DQ; n += 4) add_four(to + n * 128, sums[n], sums[n + 1], sums[n + 2], sums[n + 3]);
}
#endif

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

#if WITH_SHARES
// Sums of a thread, four in a row, as many threads apart as a group has.
template <int count>
inline void add_share(float* to, const float (&sums)[count]) {
#pragma unroll
    for (int n = 0; n < count; n += 4) add_four(to + n * 128, sums[n], sums[n + 1], sums[n + 2], sums[n + 3]);
}

template <int count>
inline void whole_of(float (&sums)[count], const float* from) {
#pragma unroll
    for (int n = 0; n < count; n += 4) {
        const float4 four = __ldcg((const float4*)(from + n * 128));
        sums[n] = four.x, sums[n + 1] = four.y, sums[n + 2] = four.z, sums[n + 3] = four.w;
    }
}

// Whether every other block of threads has added its share: whoever comes last finds the whole. Both groups are done with what lies in shared memory.
inline bool is_last(const Params& p, uint told_at) {
    __threadfence();
    meet(BOTH_GROUPS, 256);
    if (threadIdx.x == 128) store_shared(told_at, atomicAdd(p.shares_done + number_of(p), 1) + 1 == p.shares);
    meet(BOTH_GROUPS, 256);
    const bool last = load_shared(told_at) != 0;
    __threadfence();
    return last;
}
#endif

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
    const Tile tile = tile_of(p, number_of(p));
#if WITH_PACKED_KV
    // Blocks are as many as the longest document may have.
    if (tile.block * TILE_N >= span_of(p, tile.batch).len_kv) return;
#endif
    if (threadIdx.x < 128) {
        fewer_registers<BRING_REGISTERS>();
        if (threadIdx.x == 0) bring(q_map, k_map, v_map, d_o_map, p, at, tile);
#if SUMS_BY_COPY
        if (alike(int(threadIdx.x >> 5)) == 1) take_sums(p, at, tile);
#endif
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
    Steps steps = steps_of(p, reach, tile);
    Step step, next;
    float s[SCORES];
    bool more = step_on(steps, p, reach, tile, step);
    if (more) {
        barrier_wait(at.kv_full, 0);
        if (AHEAD) {
            barrier_wait(at.q_full, 0);
            score<QK_PANELS>(s, at.k + own_rows, at.q);
        }
        do {
            const uint q = at.q + ring.stage * Q_BYTES, d_o = at.d_o + ring.stage * D_O_BYTES, d_s = at.d_s + turn * D_S_BYTES;
            more = step_on(steps, p, reach, tile, next);
            if (!AHEAD) barrier_wait(at.q_full + 8 * ring.stage, ring.phase);
            float dq[DQ];
#pragma unroll
            for (int sub = 0; sub < SUBS; sub++) {
                const Corner corner = {tile.batch, step.head, step.queries * TILE_M + sub * 64 + 2 * (lane & 3),
                                       tile.block * TILE_N + group * 64 + warp * 16 + lane / 4};
                const uint sub_rows = sub * 64 * ROW_BYTES, of_rows = ring.stage * ROWS_BYTES + sub * 64 * 4 + 8 * (lane & 3);
                float d_p[SCORES], raw[RAW];
                float2 lse[PAIRS], delta[PAIRS];
                uint w[SCORES / 2], d_w[SCORES / 2];
                // Before there are scores in registers.
                const uint stay = stay_of(p, corner);
                if (!AHEAD || sub > 0) score<QK_PANELS>(s, at.k + own_rows, q + sub_rows);
                if (sub == 0) barrier_wait(at.d_o_full + 8 * ring.stage, ring.phase);
                score<V_PANELS>(d_p, at.v + own_rows, d_o + sub_rows);
                pairs_of(lse, at.lse + of_rows);
                products_wait<1>();
                hold(s);
                if (MASKED_ANYWHERE || step.partly) weights<true>(s, raw, w, p, captured, corner, lse, stay);
                else weights<false>(s, raw, w, p, captured, corner, lse, stay);
                pairs_of(delta, at.delta + of_rows);
                products_wait<0>();
                hold(d_p);
                // With one stage, in time for the next gradients of outputs to come; otherwise as late as registers are free.
                if (STAGES == 1) weigh(dv, w, d_o + sub_rows + tile.part * DV_PANELS * Q_PANEL_BYTES);
                if (MASKED_ANYWHERE || WITH_SCORE_MOD || step.partly) slopes<true>(s, raw, d_p, p, captured, gradients, corner, delta, stay);
                else slopes<false>(s, raw, d_p, p, captured, gradients, corner, delta, stay);
                pack(d_w, d_p);
                // Keys are rows there, 64 queries a panel: four matrices of 8 by 8 at once, each eighth of the warp tells where the rows of one are.
                const uint d_s_at = d_s + sub * KV_PANEL_BYTES + own_rows + (warp * 16 + (lane & 15)) * ROW_BYTES + ((lane >> 4 ^ (lane & 7)) << 4);
#pragma unroll
                for (int n = 0; n < SCORES / 2; n += 4) store_matrices(d_s_at ^ n << 3, d_w[n], d_w[n + 1], d_w[n + 2], d_w[n + 3]);
                written_for_engines();
                if (STAGES > 1) weigh(dv, w, d_o + sub_rows + tile.part * DV_PANELS * Q_PANEL_BYTES);
                if (sub + 1 == SUBS) {
                    if (STAGES == 1) values_end<0>(dv, at.d_o_free);
                    meet(BOTH_GROUPS, 256);
                    along_queries(dq, d_s + own_d_s, at.k + own_k);
                    if (STAGES > 1) values_end<1>(dv, at.d_o_free + 8 * ring.stage);
                }
                weigh(dk, d_w, q + sub_rows + tile.part * DK_PANELS * Q_PANEL_BYTES);
            }
            const uint q_free = at.q_free + 8 * ring.stage;
            ring.on();
            turn ^= 1;
            products_wait<1>();
            hold(dq);
            leave_sums(dq, slice_of(p, span, tile, step, group), at.sums);
            products_wait<0>();
            hold(dk);
            __syncwarp();
            if (lane == 0) barrier_arrive(q_free);
            // The next scores are under way while sums leave. Last, so that nothing between them and their wait touches registers of theirs.
            if (AHEAD && more) {
                barrier_wait(at.q_full + 8 * ring.stage, ring.phase);
                score<QK_PANELS>(s, at.k + own_rows, at.q + ring.stage * Q_BYTES);
            }
            step = next;
        } while (more);
    }
#if WITH_SHARES
    float* const share = p.key_sums + (long(number_of(p)) * 2 + group) * (128 * (DK + DV)) + (threadIdx.x & 127) * 4;
    add_share(share, dk);
    add_share(share + 128 * DK, dv);
    if (!is_last(p, at.lse)) return;
    whole_of(dk, share);
    whole_of(dv, share + 128 * DK);
#else
    // Both groups are done with the keys.
    meet(BOTH_GROUPS, 256);
#endif
    const uint rows_at = own_rows + warp * 16 * ROW_BYTES;
    const int first_row = tile.block * TILE_N + group * 64 + warp * 16;
    take_out(dk, p.scale, at.k + rows_at, dk_map, QK_THERE, tile.part * DK_PANELS, first_row, span, tile);
    take_out(dv, WITH_DROPOUT ? p.dropout_scale : 1.0f, at.v + rows_at, dv_map, V_THERE, tile.part * DV_PANELS, first_row, span, tile);
    if (lane == 0) copied_out();
}
