// Attention backward on compute capability 9.0: one group of threads brings operands, takes sums out and rounds them, two others have 64 keys of a block each, and
// walk over queries. Scores lie transposed, keys beside queries, so that weights and gradients of scores are operands as they are.

// Zeroes keys past the length of the batch entry: dS is 0 there, and dQ reads them.
inline void zero_keys(const Span& span, const Tile& tile, const Shared& at) {
#if WITH_SEQ_LEN_KV
    const int keys = span.len_kv - tile.block * TILE_N;
    if (keys >= TILE_N) return;
    zero_rows<QK_PANELS>(at.k, KV_PANEL_BYTES, keys, TILE_N);
    fence_proxy_async();
    named_barrier_sync(ZEROED, 256);
#endif
}

// Zeroes queries and rows of dO past the length of the batch entry: dK and dV read them.
inline void zero_queries(const Span& span, int tile, uint q, uint d_o) {
#if WITH_SEQ_LEN_Q
    const int queries = span.len_q - tile * TILE_M;
    if (queries >= TILE_M) return;
    // Both warpgroups have read what they multiply before, and find zeros after.
    named_barrier_sync(ZEROED, 256);
    zero_rows<QK_PANELS>(q, Q_PANEL_BYTES, queries, TILE_M);
    zero_rows<V_PANELS>(d_o, Q_PANEL_BYTES, queries, TILE_M);
    fence_proxy_async();
    named_barrier_sync(ZEROED, 256);
#endif
}

// Gradients of values are there, with so many products under way, and what they were made of is let go.
template <int under_way>
inline void values_end(float (&dv)[DV], uint d_o_free) {
    wgmma_wait_group<under_way>();
    wgmma_fence_operand(dv);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(d_o_free);
}

// Which step a group is at: gradients of scores have two places, and operands as many as there are stages.
struct Turn : Ring<2> {
    static_assert(STAGES <= 2, "places of operands follow from those of gradients of scores");
    inline int place() const { return STAGES == 1 ? 0 : stage; }
    inline int place_phase() const { return STAGES == 1 ? stage : phase; }
};

// Brings a block's keys and values, and tile after tile of queries and of gradients of outputs, of all heads that share the key head. The first of these come while
// the block before still has its keys.
inline void bring_block(Ring<STAGES>& ring, uint& keys, const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const TensorMap& d_o_map,
                        const Params& p, const Shared& at, const Tile& tile) {
    const Span span = span_of(p, tile.batch);
    const Reach reach = reach_of(p, span, tile.block);
    const Heads heads = heads_of(p, tile);
    bool first = true;
    for (int of = heads.first; of < heads.past; of++) {
        const int head = tile.head * p.group + of;
        Walk walk = walk_of(p, reach, tile.batch, head, tile.block);
        int queries;
        bool partly;
        while (walk_on(walk, p, reach, queries, partly)) {
            const long rows = tile_place(p, span, tile.batch, head, queries) * TILE_M;
            // Done with first, so asked for first.
            mbarrier_wait_parity(at.d_o_free + 8 * ring.stage, ring.phase ^ 1);
            mbarrier_arrive_expect_tx(at.d_o_full + 8 * ring.stage, D_O_BYTES + ROWS_BYTES);
            cp_async_bulk_load(at.delta + ring.stage * ROWS_BYTES, p.delta + rows, ROWS_BYTES, at.d_o_full + 8 * ring.stage);
            queries_in<TILE_M, V_PANELS, V_THERE>(at.d_o + ring.stage * D_O_BYTES, d_o_map, at.d_o_full + 8 * ring.stage, span, queries, head,
                                                  tile.batch);
            mbarrier_wait_parity(at.q_free + 8 * ring.stage, ring.phase ^ 1);
            mbarrier_arrive_expect_tx(at.q_full + 8 * ring.stage, Q_BYTES + ROWS_BYTES);
            cp_async_bulk_load(at.lse + ring.stage * ROWS_BYTES, p.lse + rows, ROWS_BYTES, at.q_full + 8 * ring.stage);
            queries_in<TILE_M, QK_PANELS, QK_THERE>(at.q + ring.stage * Q_BYTES, q_map, at.q_full + 8 * ring.stage, span, queries, head,
                                                    tile.batch);
            ring.on();
            if (first) {
                mbarrier_wait_parity(at.kv_free, keys ^ 1);
                mbarrier_arrive_expect_tx(at.kv_full, K_BYTES + V_BYTES);
                keys_in<TILE_N, QK_PANELS, QK_THERE>(at.k, k_map, at.kv_full, span, tile.block, tile.head, tile.batch);
                keys_in<TILE_N, V_PANELS, V_THERE>(at.v, v_map, at.kv_full, span, tile.block, tile.head, tile.batch);
                keys ^= 1;
                first = false;
            }
        }
    }
    // Zeros leave from where keys would be: no others come before that.
    if (!SUMS_BY_COPY && first) {
        mbarrier_wait_parity(at.kv_free, keys ^ 1);
        mbarrier_arrive(at.kv_full);
        keys ^= 1;
    }
}

// Takes block after block of keys.
inline void bring(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const TensorMap& d_o_map, const Params& p,
                  const Shared& at) {
    Ring<STAGES> ring;
    Told told;
    uint keys = 0;
    while (true) {
        const int number = take_next(told, p, at);
        if (number >= p.last) return;
        if (number >= p.numbers) continue;
        const Tile tile = tile_of(p, number);
        if (!is_none(p, tile)) bring_block(ring, keys, q_map, k_map, v_map, d_o_map, p, at, tile);
    }
}

#if SUMS_BY_COPY
// What each group has left in shared memory of a block's steps is added by the copy engine, beside what the group does next.
inline void take_sums_of(const Params& p, const Shared& at, const Tile& tile) {
    const Span span = span_of(p, tile.batch);
    const Reach reach = reach_of(p, span, tile.block);
    Steps steps = steps_of(p, reach, tile);
    Step step;
    const bool first = threadIdx.x == 32;
    // What was summed up in its place before has left.
    if (first && p.ring > 0 && tile.section >= p.ring) counter_acquire_wait(p.settled + tile.section - p.ring, slices_in(p, tile.section - p.ring));
    while (true) {
        const bool more = step_on(steps, p, reach, tile, step);
        // The first group's has been read, then the second's.
        if (first) cp_async_bulk_wait_group_read<1>();
        __syncwarp();
        named_barrier_arrive(SUMS_FREE, 160);
        if (first) cp_async_bulk_wait_group_read();
        __syncwarp();
        named_barrier_arrive(SUMS_FREE + 1, 160);
        if (!more) return;
        for (int group = 0; group < 2; group++) {
            named_barrier_sync(SUMS_THERE + group, 160);
            if (first) {
                cp_reduce_async_bulk_add(slice_at(p, span, tile, step.head, step.queries, group), at.sums + group * SUMS_BYTES, SUMS_BYTES);
                cp_async_bulk_commit_group();
            }
        }
    }
}

// A warp of its own asks for that, of block after block, and counts which are done.
inline void take_sums(const Params& p, const Shared& at) {
    Told told;
    while (true) {
        const int number = next_of(told, at);
        if (number >= p.last) return;
        if (number >= p.numbers) continue;
        const Tile tile = tile_of(p, number);
        const bool none = is_none(p, tile);
        if (!none) take_sums_of(p, at, tile);
        if (threadIdx.x == 32) {
            cp_async_bulk_wait_group();
            counter_release_add(p.done + tile.section, 1);
        }
        // Gradients of values have been where sums were: what comes next is not told before.
        for (int group = 0; group < 2 && !none; group++) named_barrier_sync(SUMS_THERE + group, 160);
    }
}

// A group leaves its slice for that warp, a warp's piece after the other, in the order in which its threads have it. Its number is asked for once more: as it is, it would take a place that
// the operands of products need.
inline void leave_sums(const float (&sums)[DQ], float*, uint at) {
    const int group = alike(int(threadIdx.x >> 7)) - 1;
    named_barrier_sync(SUMS_FREE + group, 160);
    at += group * SUMS_BYTES + (threadIdx.x >> 5 & 3) * PIECE_BYTES + (threadIdx.x & 31) * 16;
#pragma unroll
    for (int n = 0; n < DQ; n += 4) st_shared_v4_f32(at + n * 128, sums[n], sums[n + 1], sums[n + 2], sums[n + 3]);
    fence_proxy_async();
    named_barrier_arrive(SUMS_THERE + group, 160);
}
#else
inline void leave_sums(const float (&sums)[DQ], float* to, uint) {
    add_slice(sums, to);
}
#endif

// Gradients of the queries of the step before, from what both groups have left of it: neither waits for the other's step. Nothing waits but for that.
inline void along_before(float (&dq)[DQ], const Turn& turn, const Shared& at, uint own_d_s, uint own_k) {
    const int before = turn.stage ^ 1;
    mbarrier_wait_parity(at.d_s_full + 8 * before, turn.phase ^ before);
    along_queries(dq, at.d_s + before * D_S_BYTES + own_d_s, at.k + own_k);
}

// They are there, and leave.
inline void leave_before(float (&dq)[DQ], float* to, const Turn& turn, const Shared& at) {
    wgmma_fence_operand(dq);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(at.d_s_free + 8 * (turn.stage ^ 1));
    leave_sums(dq, to, at.sums);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_backward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                       const __grid_constant__ TensorMap d_o_map, const __grid_constant__ TensorMap dq_map, const __grid_constant__ TensorMap dk_map,
                       const __grid_constant__ TensorMap dv_map, const __grid_constant__ Params p, const __grid_constant__ Captured captured, const __grid_constant__ Gradients gradients) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Shared at = layout(shared_address(memory));
    if (threadIdx.x == 0) {
        mbarrier_init(at.kv_full, 1);
        mbarrier_init(at.kv_free, WARPS);
        for (int stage = 0; stage < STAGES; stage++) {
            mbarrier_init(at.q_full + 8 * stage, 1);
            mbarrier_init(at.d_o_full + 8 * stage, 1);
            mbarrier_init(at.q_free + 8 * stage, WARPS);
            mbarrier_init(at.d_o_free + 8 * stage, WARPS);
        }
        for (int n = 0; n < 2; n++) {
            mbarrier_init(at.told_full + 8 * n, 1);
            mbarrier_init(at.told_free + 8 * n, TOLD_WARPS);
        }
        for (int n = 0; n < 2; n++) {
            mbarrier_init(at.d_s_full + 8 * n, WARPS);
            mbarrier_init(at.d_s_free + 8 * n, WARPS);
        }
        for (int n = 0; n < 4; n++) mbarrier_init(at.settled_full + 8 * n, 1);
        fence_mbarrier_init();
    }
    if (SUMS_BY_COPY && threadIdx.x * 16 < PIECE_BYTES) {
        st_shared_v4_f32(at.zeros + threadIdx.x * 16, 0.0f, 0.0f, 0.0f, 0.0f);
        fence_proxy_async();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        setmaxnreg_dec<BRING_REGISTERS>();
        if (threadIdx.x == 0) bring(q_map, k_map, v_map, d_o_map, p, at);
#if SUMS_BY_COPY
        const int job = alike(int(threadIdx.x >> 5));
        if (job == 1) take_sums(p, at);
        else if (job > 1) settle_all(dq_map, p, at);
#endif
        return;
    }
    setmaxnreg_inc<GROUP_REGISTERS>();
    const int group = alike(int(threadIdx.x >> 7)) - 1, lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    const uint own_rows = group * 64 * ROW_BYTES;
    Turn turn;
    Told told;
    uint keys = 0;
    while (true) {
        const int number = next_of(told, at);
        if (number >= p.last) break;
        if (number >= p.numbers) continue;
        const Tile tile = tile_of(p, number);
        if (is_none(p, tile)) continue;
        // What the block before left in shared memory has been read.
        if (lane == 0) cp_async_bulk_wait_group_read();
        __syncwarp();
        // Of gradients of queries, a group has its half of the rows or its panel of the columns.
        const uint own_d_s = TILE_M == 128 ? group * KV_PANEL_BYTES : 0, own_k = TILE_M == 128 ? 0 : (tile.part * 2 + group) * KV_PANEL_BYTES;
        // Wide heads without a 2-CTA cluster: both CTAs of a tile recompute the same scores, each for its own columns of dK and dV.
        const bool owns_scores = PARTS == 1 || tile.part == 0;
        const Span span = span_of(p, tile.batch);
        const Reach reach = with_large(p, reach_of(p, span, tile.block));
        float dk[DK], dv[DV];
#pragma unroll
        for (int n = 0; n < DK; n++) dk[n] = 0.0f;
#pragma unroll
        for (int n = 0; n < DV; n++) dv[n] = 0.0f;
        Steps steps = steps_of(p, reach, tile);
        Step step, next;
        float s[SCORES];
        bool more = step_on(steps, p, reach, tile, step), behind = false;
        const bool any = more;
        if (any) {
            mbarrier_wait_parity(at.kv_full, keys);
            keys ^= 1;
            zero_keys(span, tile, at);
            uint k_held[HELD_QK], v_held[HELD_V];
            hold_rows(k_held, at.k + own_rows, KV_PANEL_BYTES);
            hold_rows(v_held, at.v + own_rows, KV_PANEL_BYTES);
            // Where sums of the step before go.
            float* to = nullptr;
            if (AHEAD) {
                mbarrier_wait_parity(at.q_full + 8 * turn.place(), turn.place_phase());
                score<QK_STEPS>(s, at.k + own_rows, k_held, at.q + turn.place() * Q_BYTES);
            }
            do {
                const uint q = at.q + turn.place() * Q_BYTES, d_o = at.d_o + turn.place() * D_O_BYTES, d_s = at.d_s + turn.stage * D_S_BYTES;
                if (!NEXT_LAST) more = step_on(steps, p, reach, tile, next);
                if (!AHEAD) mbarrier_wait_parity(at.q_full + 8 * turn.place(), turn.place_phase());
#pragma unroll
                for (int sub = 0; sub < SUBS; sub++) {
                    const Corner corner = {tile.batch, step.head, step.queries * TILE_M + sub * 64 + 2 * (lane & 3),
                                           tile.block * TILE_N + group * 64 + warp * 16 + lane / 4};
                    const uint sub_rows = sub * 64 * ROW_BYTES, of_rows = turn.place() * ROWS_BYTES + sub * 64 * 4 + 8 * (lane & 3);
                    const uint of_keys = q + sub_rows + tile.part * DK_PANELS * Q_PANEL_BYTES, of_values = d_o + sub_rows + tile.part * DV_PANELS * Q_PANEL_BYTES;
                    float d_p[SCORES], raw[RAW];
                    float2 lse[PAIRS], delta[PAIRS];
                    uint w[SCORES / 2], d_w[SCORES / 2];
                    // Before there are scores in registers.
                    const uint stay = stay_of(p, corner);
                    if (ROWS_FIRST) pairs_of(lse, at.lse + of_rows);
                    if (!AHEAD || sub > 0) score<QK_STEPS>(s, at.k + own_rows, k_held, q + sub_rows);
                    if (sub == 0) mbarrier_wait_parity(at.d_o_full + 8 * turn.place(), turn.place_phase());
                    score<V_STEPS>(d_p, at.v + own_rows, v_held, d_o + sub_rows);
                    if (!ROWS_FIRST) pairs_of(lse, at.lse + of_rows);
                    wgmma_wait_group<1>();
                    wgmma_fence_operand(s);
                    weights_either(step.partly, s, raw, w, p, captured, corner, lse, stay);
                    // Before their products are waited for, but where registers are short.
                    if (!TIGHT) pairs_of(delta, at.delta + of_rows);
                    wgmma_wait_group<0>();
                    wgmma_fence_operand(d_p);
                    if (sub == 0) zero_queries(span, step.queries, q, d_o);
                    if (TIGHT) pairs_of(delta, at.delta + of_rows);
                    if (MASKED_ANYWHERE || WITH_SCORE_MOD || step.partly) slopes<true>(s, raw, d_p, p, captured, gradients, corner, delta, stay, owns_scores);
                    else slopes<false>(s, raw, d_p, p, captured, gradients, corner, delta, stay, owns_scores);
                    pack(d_w, d_p);
                    // Both groups have read what was there two steps ago.
                    if (sub == 0) mbarrier_wait_parity(at.d_s_free + 8 * turn.stage, turn.phase ^ 1);
                    // Keys are rows there, 64 queries a panel: four matrices of 8 by 8 at once, each eighth of the warp tells where the rows of one are.
                    const uint d_s_at = d_s + sub * KV_PANEL_BYTES + own_rows + (warp * 16 + (lane & 15)) * ROW_BYTES + ((lane >> 4 ^ (lane & 7)) << 4);
#pragma unroll
                    for (int n = 0; n < SCORES / 2; n += 4) stmatrix_x4(d_s_at ^ n << 3, d_w[n], d_w[n + 1], d_w[n + 2], d_w[n + 3]);
                    // Behind the product, which needs none of it: the group waits here until what it stored has arrived.
                    const auto values = [&] {
                        weigh(dv, w, of_values);
                        if (sub + 1 < SUBS) return;
                        fence_proxy_async();
                        __syncwarp();
                        if (lane == 0) mbarrier_arrive(at.d_s_full + 8 * turn.stage);
                    };
                    if (sub + 1 < SUBS) {
                        values();
                        weigh(dk, d_w, of_keys);
                    } else if (behind) {
                        float dq[DQ];
                        values();
                        along_before(dq, turn, at, own_d_s, own_k);
                        values_end<1>(dv, at.d_o_free + 8 * turn.place());
                        weigh(dk, d_w, of_keys);
                        wgmma_wait_group<1>();
                        leave_before(dq, to, turn, at);
                        wgmma_wait_group<0>();
                        wgmma_fence_operand(dk);
                    } else {
                        values();
                        weigh(dk, d_w, of_keys);
                        values_end<1>(dv, at.d_o_free + 8 * turn.place());
                        wgmma_wait_group<0>();
                        wgmma_fence_operand(dk);
                    }
                }
                __syncwarp();
                if (lane == 0) mbarrier_arrive(at.q_free + 8 * turn.place());
                if (!SUMS_BY_COPY) to = slice_at(p, span, tile, step.head, step.queries, tile.part * 2 + group);
                turn.on();
                if (NEXT_LAST) more = step_on(steps, p, reach, tile, next);
                behind = true;
                // The next scores are under way while the step ends. Last, so that nothing between them and their wait touches registers of theirs.
                if (AHEAD && more) {
                    mbarrier_wait_parity(at.q_full + 8 * turn.place(), turn.place_phase());
                    score<QK_STEPS>(s, at.k + own_rows, k_held, at.q + turn.place() * Q_BYTES);
                }
                step = next;
            } while (more);
            float dq[DQ];
            along_before(dq, turn, at, own_d_s, own_k);
            wgmma_wait_group<0>();
            leave_before(dq, to, turn, at);
            // The next keys come while gradients leave, from where gradients of scores and sums were.
            if (SUMS_BY_COPY && lane == 0) mbarrier_arrive(at.kv_free);
        } else if (!SUMS_BY_COPY) {
            mbarrier_wait_parity(at.kv_full, keys);
            keys ^= 1;
        }
#if TIGHT || WITH_PACKED_KV
        // Not kept over the walk, but made again.
        const Tile done = tile_of(p, opaque_int(number));
#else
        const Tile& done = tile;
#endif
        bool whole = true;
#if WITH_SHARES
        float* const share = p.key_sums + (long(done.number) * 2 + group) * (128 * (DK + DV)) + (threadIdx.x & 127) * 4;
        add_share(share, dk);
        add_share(share + 128 * DK, dv);
        whole = is_last(p, at, done, [](int) { named_barrier_sync(BOTH_GROUPS, 256); });
        if (whole) {
            whole_of(dk, share);
            whole_of(dv, share + 128 * DK);
        }
#else
        // Both groups are done with the keys, and with gradients of scores.
        named_barrier_sync(BOTH_GROUPS, 256);
#endif
        const uint in_group = warp * 16 * ROW_BYTES;
        const int first_row = done.block * TILE_N + group * 64 + warp * 16;
        const float of_values = WITH_DROPOUT ? p.dropout_scale : 1.0f;
        if (whole) take_out<KV_PANEL_BYTES>(dk, p.scale, at.d_s + own_rows + in_group, dk_map, QK_THERE, done.part * DK_PANELS, first_row, span, done);
#if SUMS_BY_COPY
        named_barrier_sync(SUMS_FREE + group, 160);
        if (whole) take_out<64 * ROW_BYTES>(dv, of_values, at.sums + group * SUMS_BYTES + in_group, dv_map, V_THERE, 0, first_row, span, done);
        named_barrier_arrive(SUMS_THERE + group, 160);
#else
        if (whole) take_out<KV_PANEL_BYTES>(dv, of_values, at.k + own_rows + in_group, dv_map, V_THERE, done.part * DV_PANELS, first_row, span, done);
        if (lane == 0) {
            cp_async_bulk_wait_group_read();
            mbarrier_arrive(at.kv_free);
        }
#endif
    }
    if (lane == 0) cp_async_bulk_wait_group_read();
}
