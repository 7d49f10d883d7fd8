// Attention backward of wide heads on compute capability 9.0: a pair of blocks of threads has a block of keys, each of them a half. Of these a block has scores and all columns
// of gradients of keys and values; of those of queries it has a half of the columns, over the keys of both, so that blocks exchange gradients of scores. Of its groups
// one has scores, weights and gradients of values, the other gradients of weights and of keys; a third brings operands.

// The next number, for a thread that stands for its warp.
inline int told_in_pair(Told& told, const Shared& at) {
    mbarrier_wait_parity_acquire_cluster(told.full(at), told.phase());
    const int number = int(ld_shared(told.place(at)));
    mbarrier_arrive_peer(told.free(at), 0);
    told.count++;
    return number;
}

// The next block of keys, taken by one thread for the pair: each of its blocks is told its own number.
inline int take_in_pair(Told& told, const Params& p, const Shared& at, uint rank) {
    if (rank == 0) {
        mbarrier_wait_parity(told.free(at), told.phase() ^ 1);
        const int taken = atomicAdd(p.taken, 1), shares = shares_of(p), first = taken / shares * PARTS * shares + taken % shares;
        for (uint other = 0; other < 2; other++) st_mbarrier_arrive_release_cluster(told.place(at), uint(first + int(other) * shares), told.full(at), other);
        told.count++;
        return first;
    }
    return told_in_pair(told, at);
}

// That number, for a warp.
inline int next_in_pair(Told& told, const Shared& at) {
    mbarrier_wait_parity_acquire_cluster(told.full(at), told.phase());
    const int number = alike(int(ld_shared(told.place(at))));
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive_peer(told.free(at), 0);
    told.count++;
    return number;
}

// Keys and values of a block, and of the other's keys those columns along which this one has gradients of queries.
inline void keys_of_pair_in(const TensorMap& k_map, const TensorMap& v_map, const Shared& at, const Span& span, const Tile& tile) {
    const int own = tile.block * 2 + tile.part, other = own ^ 1;
    mbarrier_arrive_expect_tx(at.kv_full, K_BYTES + V_BYTES + K_OTHER_BYTES);
    keys_in<KEYS, QK_PANELS, QK_THERE>(at.k, k_map, at.kv_full, span, own, tile.head, tile.batch);
    keys_in<KEYS, V_PANELS, V_THERE>(at.v, v_map, at.kv_full, span, own, tile.head, tile.batch);
    keys_in<KEYS, QK_PANELS / 2, QK_THERE>(at.k_other, k_map, at.kv_full, span, other, tile.head, tile.batch, tile.part * QK_PANELS / 2);
}

// Brings rows of a step's queries, of which each block brings a half of the panels to both. Of documents each brings its own, as some of these are zeros from elsewhere.
template <int panels, int of_tensor>
inline void rows_in_pair(uint to, const TensorMap& map, uint barrier, const Span& span, const Step& step, const Tile& tile) {
#if WITH_PACKED_Q
    queries_in<TILE_M, panels, of_tensor>(to, map, barrier, span, step.queries, step.head, tile.batch);
#else
    for (int panel = tile.part * panels / 2; panel < (tile.part + 1) * panels / 2; panel++) {
        tma_load_multicast(to + panel * Q_PANEL_BYTES, map, barrier, panel * PANEL, step.queries * TILE_M, step.head, tile.batch);
    }
#endif
}

// Brings a block's keys and values, and tile after tile of queries, of all heads that share the key head.
inline void bring_queries(Ring<STAGES>& ring, uint& keys, const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const Params& p,
                          const Shared& at, const Tile& tile) {
    const Span span = span_of(p, tile.batch);
    const Reach reach = reach_of(p, span, tile.block);
    Steps steps = steps_of(p, reach, tile);
    Step step;
    bool first = true;
    while (step_on(steps, p, reach, tile, step)) {
        const uint full = at.q_full + 8 * ring.stage;
        mbarrier_wait_parity(at.q_free + 8 * ring.stage, ring.phase ^ 1);
        mbarrier_arrive_expect_tx(full, Q_BYTES + ROWS_BYTES);
        rows_in_pair<QK_PANELS, QK_THERE>(at.q + ring.stage * Q_BYTES, q_map, full, span, step, tile);
        cp_async_bulk_load(at.lse + ring.stage * ROWS_BYTES, p.lse + tile_place(p, span, tile.batch, step.head, step.queries) * TILE_M, ROWS_BYTES, full);
        ring.on();
        if (first) {
            mbarrier_wait_parity(at.kv_free, keys ^ 1);
            keys_of_pair_in(k_map, v_map, at, span, tile);
            keys ^= 1;
            first = false;
        }
    }
    // Zeros leave from where keys would be: no others come before that.
    if (first) {
        mbarrier_wait_parity(at.kv_free, keys ^ 1);
        mbarrier_arrive(at.kv_full);
        keys ^= 1;
    }
}

// Another warp brings gradients of outputs.
inline void bring_outputs(Ring<D_O_STAGES>& ring, const TensorMap& d_o_map, const Params& p, const Shared& at, const Tile& tile) {
    const Span span = span_of(p, tile.batch);
    const Reach reach = reach_of(p, span, tile.block);
    Steps steps = steps_of(p, reach, tile);
    Step step;
    while (step_on(steps, p, reach, tile, step)) {
        const uint full = at.d_o_full + 8 * ring.stage;
        mbarrier_wait_parity(at.d_o_free + 8 * ring.stage, ring.phase ^ 1);
        mbarrier_arrive_expect_tx(full, D_O_BYTES + ROWS_BYTES);
        rows_in_pair<V_PANELS, V_THERE>(at.d_o + ring.stage * D_O_BYTES, d_o_map, full, span, step, tile);
        cp_async_bulk_load(at.delta + ring.stage * ROWS_BYTES, p.delta + tile_place(p, span, tile.batch, step.head, step.queries) * TILE_M, ROWS_BYTES, full);
        ring.on();
    }
}

// They do so for block after block of keys.
inline void bring(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const Params& p, const Shared& at, uint rank) {
    Ring<STAGES> ring;
    Told told;
    uint keys = 0;
    while (true) {
        const int number = take_in_pair(told, p, at, rank);
        if (number >= p.last) return;
        const Tile tile = tile_of(p, number);
        if (!is_none(p, tile)) bring_queries(ring, keys, q_map, k_map, v_map, p, at, tile);
    }
}

inline void bring_others(const TensorMap& d_o_map, const Params& p, const Shared& at) {
    Ring<D_O_STAGES> ring;
    Told told;
    while (true) {
        const int number = told_in_pair(told, at);
        if (number >= p.last) return;
        const Tile tile = tile_of(p, number);
        if (!is_none(p, tile)) bring_outputs(ring, d_o_map, p, at, tile);
    }
}

// Which step a group is at: queries and gradients of scores have two places, gradients of outputs as many as there is room for.
struct Turn : Ring<2> {
    inline int output() const { return D_O_STAGES == 1 ? 0 : stage; }
    inline int output_phase() const { return D_O_STAGES == 1 ? stage : phase; }
};

// What a group walks over: a block of keys, its steps, and where its warps are in shared memory.
struct Walked {
    const Params& p;
    const Captured& captured;
    const Shared& at;
    const Tile& tile;
    const Span& span;
    const Reach& reach;
    int group, warp, lane;

    inline Corner corner(const Step& step) const {
        return Corner{tile.batch, step.head, step.queries * TILE_M + 2 * (lane & 3), tile.block * TILE_N + tile.part * KEYS + warp * 16 + lane / 4};
    }
    inline float* sums(const Step& step) const { return slice_at(p, span, tile, step.head, step.queries, tile.part * 2 + group); }
    // Where a warp's gradients of scores are, of a step.
    inline uint own_slopes(const Turn& turn) const { return at.d_s + turn.stage * D_S_BYTES + tile.part * KV_PANEL_BYTES + warp * 16 * ROW_BYTES; }
    // Where a thread's weights are.
    inline uint weights() const { return at.weights + (threadIdx.x & 127) * 16; }
    // A warp is done with something; of what comes to both blocks at once both are told.
    inline void done_with(uint barrier) const {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(barrier);
    }
    inline void both_done_with(uint barrier) const {
        __syncwarp();
        if (lane != 0) return;
        mbarrier_arrive(barrier);
        mbarrier_arrive_peer(barrier, tile.part ^ 1);
    }
};

// Zeroes keys past the length of the batch entry: dS is 0 there, and dQ reads them, those of the other thread block too.
inline void zero_keys(const Walked& of) {
#if WITH_SEQ_LEN_KV
    if ((of.tile.block + 1) * TILE_N <= of.span.len_kv) return;
    const int own = of.tile.block * 2 + of.tile.part;
    zero_rows<QK_PANELS>(of.at.k, KV_PANEL_BYTES, of.span.len_kv - own * KEYS, KEYS);
    zero_rows<QK_PANELS / 2>(of.at.k_other, KV_PANEL_BYTES, of.span.len_kv - (own ^ 1) * KEYS, KEYS);
    rows_are_zero();
#endif
}

// Zeroes rows of queries or of dO past the length of the batch entry: dK and dV read them.
template <int panels>
inline void zero_queries(const Walked& of, const Step& step, uint at) {
#if WITH_SEQ_LEN_Q
    const int queries = of.span.len_q - step.queries * TILE_M;
    if (queries >= TILE_M) return;
    zero_rows<panels>(at, Q_PANEL_BYTES, queries, TILE_M);
    rows_are_zero();
#endif
}

// Gradients of the queries of the step before along a panel of columns, from gradients of scores of both blocks, this one's first. Nothing waits but for these.
inline void along_before(float (&dq)[DQ], const Turn& turn, const Walked& of) {
    const int before = turn.stage ^ 1;
    mbarrier_wait_parity(of.at.d_s_full + 8 * before, turn.phase ^ before);
    const uint d_s = of.at.d_s + before * D_S_BYTES;
    const ulong64 own = descriptor_mn_major(d_s + of.tile.part * KV_PANEL_BYTES, KV_PANEL_BYTES);
    const ulong64 other = descriptor_mn_major(d_s + (of.tile.part ^ 1) * KV_PANEL_BYTES, KV_PANEL_BYTES);
    const ulong64 k_own = descriptor_mn_major(of.at.k + (of.tile.part * 2 + of.group) * KV_PANEL_BYTES, KV_PANEL_BYTES);
    const ulong64 k_other = descriptor_mn_major(of.at.k_other + of.group * KV_PANEL_BYTES, KV_PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) wgmma_mn_major(dq, descriptor_advance(own, step * 16 * ROW_BYTES), descriptor_advance(k_own, step * 16 * ROW_BYTES), step > 0);
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) wgmma_mn_major(dq, descriptor_advance(other, step * 16 * ROW_BYTES), descriptor_advance(k_other, step * 16 * ROW_BYTES), true);
    wgmma_commit_group();
}

// They are there: what they were made of may be written anew, here and by the other block.
inline void along_ends(float (&dq)[DQ], const Turn& turn, const Walked& of) {
    wgmma_fence_operand(dq);
    of.both_done_with(of.at.d_s_free + 8 * (turn.stage ^ 1));
}

// Those of the last step of a walk.
inline void along_last(const Turn& turn, const Walked& of, float* to) {
    float dq[DQ];
    along_before(dq, turn, of);
    wgmma_wait_group<0>();
    along_ends(dq, turn, of);
    add_slice(dq, to);
}

inline void scores_of(float (&s)[SCORES], const Turn& turn, const Walked& of) {
    const uint none[1] = {0};
    mbarrier_wait_parity(of.at.q_full + 8 * turn.stage, turn.phase);
    score<QK_STEPS>(s, of.at.k, none, of.at.q + turn.stage * Q_BYTES);
}

// The group that has scores: weights, which the other group is told of, and gradients of values. The next scores are asked for at the end of a step.
inline void walk_for_values(float (&dv)[DV], Turn& turn, const Walked& of) {
    const Shared& at = of.at;
    Steps steps = steps_of(of.p, of.reach, of.tile);
    Step step, next;
    bool more = step_on(steps, of.p, of.reach, of.tile, step), behind = false;
    if (!more) return;
    float s[SCORES];
    scores_of(s, turn, of);
    // Where sums of the step before go.
    float* to = nullptr;
    do {
        more = step_on(steps, of.p, of.reach, of.tile, next);
        const Corner corner = of.corner(step);
        float raw[RAW];
        float2 lse[PAIRS];
        uint w[SCORES / 2];
        pairs_of(lse, at.lse + turn.stage * ROWS_BYTES + 8 * (of.lane & 3));
        wgmma_wait_group<0>();
        wgmma_fence_operand(s);
        of.both_done_with(at.q_free + 8 * turn.stage);
        weights_either(step.partly, s, raw, w, of.p, of.captured, corner, lse, 0);
        // The warp that has the same keys has read what was there.
        mbarrier_wait_parity(at.weights_free + 8 * of.warp, turn.stage ^ 1);
#pragma unroll
        for (int n = 0; n < SCORES; n += 4) st_shared_v4_f32(of.weights() + n * 512, s[n], s[n + 1], s[n + 2], s[n + 3]);
        of.done_with(at.weights_full + 8 * of.warp);
        const uint d_o = at.d_o + turn.output() * D_O_BYTES, d_o_free = at.d_o_free + 8 * turn.output();
        mbarrier_wait_parity(at.d_o_full + 8 * turn.output(), turn.output_phase());
        zero_queries<V_PANELS>(of, step, d_o);
        if (behind) {
            float dq[DQ];
            weigh(dv, w, d_o);
            along_before(dq, turn, of);
            wgmma_wait_group<1>();
            wgmma_fence_operand(dv);
            of.both_done_with(d_o_free);
            wgmma_wait_group<0>();
            along_ends(dq, turn, of);
            add_slice(dq, to);
        } else {
            weigh(dv, w, d_o);
            wgmma_wait_group<0>();
            wgmma_fence_operand(dv);
            of.both_done_with(d_o_free);
        }
        to = of.sums(step);
        behind = true;
        turn.on();
        // Last, so that nothing between them and their wait touches registers of theirs.
        if (more) scores_of(s, turn, of);
        step = next;
    } while (more);
    along_last(turn, of, to);
}

// Gradients of scores go to both blocks: where both have read what was there two steps ago.
inline void leave_slopes(const uint (&d_w)[SCORES / 2], const Turn& turn, const Walked& of) {
    mbarrier_wait_parity(of.at.d_s_free + 8 * turn.stage, turn.phase ^ 1);
    const uint rows = of.own_slopes(turn) + (of.lane & 15) * ROW_BYTES + ((of.lane >> 4 ^ (of.lane & 7)) << 4);
#pragma unroll
    for (int n = 0; n < SCORES / 2; n += 4) stmatrix_x4(rows ^ n << 3, d_w[n], d_w[n + 1], d_w[n + 2], d_w[n + 3]);
}

// A warp's rows are in a row: the other block's come as they go.
inline void send_slopes(const Turn& turn, const Walked& of) {
    fence_proxy_async();
    __syncwarp();
    if (of.lane != 0) return;
    const uint full = of.at.d_s_full + 8 * turn.stage;
    mbarrier_arrive_expect_tx(full, 16 * ROW_BYTES);
    cp_async_bulk_to_peer(of.own_slopes(turn), 16 * ROW_BYTES, full, of.tile.part ^ 1);
}

// The other group: gradients of weights, of scores, and of keys.
inline void walk_for_keys(float (&dk)[DK], const Gradients& gradients, Turn& turn, const Walked& of) {
    const Shared& at = of.at;
    Steps steps = steps_of(of.p, of.reach, of.tile);
    Step step;
    bool behind = false;
    float* to = nullptr;
    while (step_on(steps, of.p, of.reach, of.tile, step)) {
        const Corner corner = of.corner(step);
        const uint none[1] = {0};
        float s[SCORES], d_p[SCORES], raw[RAW];
        float2 delta[PAIRS];
        uint d_w[SCORES / 2];
        mbarrier_wait_parity(at.d_o_full + 8 * turn.output(), turn.output_phase());
        score<V_STEPS>(d_p, at.v, none, at.d_o + turn.output() * D_O_BYTES);
        pairs_of(delta, at.delta + turn.output() * ROWS_BYTES + 8 * (of.lane & 3));
        wgmma_wait_group<0>();
        wgmma_fence_operand(d_p);
        of.both_done_with(at.d_o_free + 8 * turn.output());
        mbarrier_wait_parity(at.weights_full + 8 * of.warp, turn.stage);
#pragma unroll
        for (int n = 0; n < SCORES; n += 4) {
            const float4 four = ld_shared_v4_f32(of.weights() + n * 512);
            s[n] = four.x, s[n + 1] = four.y, s[n + 2] = four.z, s[n + 3] = four.w;
        }
        of.done_with(at.weights_free + 8 * of.warp);
        if (MASKED_ANYWHERE || WITH_SCORE_MOD || step.partly) slopes<true>(s, raw, d_p, of.p, of.captured, gradients, corner, delta, 0, true);
        else slopes<false>(s, raw, d_p, of.p, of.captured, gradients, corner, delta, 0, true);
        pack(d_w, d_p);
        leave_slopes(d_w, turn, of);
        mbarrier_wait_parity(at.q_full + 8 * turn.stage, turn.phase);
        const uint q = at.q + turn.stage * Q_BYTES;
        zero_queries<QK_PANELS>(of, step, q);
        if (behind) {
            float dq[DQ];
            weigh(dk, d_w, q);
            send_slopes(turn, of);
            along_before(dq, turn, of);
            wgmma_wait_group<1>();
            wgmma_fence_operand(dk);
            of.both_done_with(at.q_free + 8 * turn.stage);
            wgmma_wait_group<0>();
            along_ends(dq, turn, of);
            add_slice(dq, to);
        } else {
            weigh(dk, d_w, q);
            send_slopes(turn, of);
            wgmma_wait_group<0>();
            wgmma_fence_operand(dk);
            of.both_done_with(at.q_free + 8 * turn.stage);
        }
        to = of.sums(step);
        behind = true;
        turn.on();
    }
    if (behind) along_last(turn, of, to);
}

// Both groups come here, from two places of the text: each waits at a barrier of its own, at which the other arrives. The second time at others, as threads may still be on
// their way to the first; before the next block of keys all have passed both.
template <int group>
inline void groups_meet(int time) {
    named_barrier_arrive(OTHER_GROUP + 2 * time + (group ^ 1), 256);
    named_barrier_sync(OTHER_GROUP + 2 * time + group, 256);
}

// Gradients of a block's keys or values leave from where these were, of shares once whoever comes last has the whole.
template <int group, int count>
inline void gradients_out(float (&sums)[count], float scale, uint from, const TensorMap& map, int panels, const Walked& of) {
    bool whole = true;
#if WITH_SHARES
    float* const share = of.p.key_sums + long(of.tile.number) * 128 * (DK + DV) + group * 128 * DV + (threadIdx.x & 127) * 4;
    add_share(share, sums);
    whole = is_last(of.p, of.at, of.tile, groups_meet<group>);
    if (whole) whole_of(sums, share);
#else
    // Both groups are done with the keys.
    groups_meet<group>(0);
#endif
    const int first_row = of.tile.block * TILE_N + of.tile.part * KEYS + of.warp * 16;
    if (whole) take_out<KV_PANEL_BYTES>(sums, scale, from + of.warp * 16 * ROW_BYTES, map, panels, 0, first_row, of.span, of.tile);
    if (of.lane == 0) {
        cp_async_bulk_wait_group_read();
        mbarrier_arrive(of.at.kv_free);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(2, 1, 1)
    attention_backward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                       const __grid_constant__ TensorMap d_o_map, const __grid_constant__ TensorMap dq_map, const __grid_constant__ TensorMap dk_map,
                       const __grid_constant__ TensorMap dv_map, const __grid_constant__ Params p, const __grid_constant__ Captured captured, const __grid_constant__ Gradients gradients) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Shared at = layout(shared_address(memory));
    const uint rank = cluster_cta_rank();
    if (threadIdx.x == 0) {
        mbarrier_init(at.kv_full, 1);
        mbarrier_init(at.kv_free, WARPS);
        for (int n = 0; n < D_O_STAGES; n++) {
            mbarrier_init(at.d_o_full + 8 * n, 1);
            mbarrier_init(at.d_o_free + 8 * n, 2 * WARPS);
        }
        for (int n = 0; n < STAGES; n++) {
            mbarrier_init(at.q_full + 8 * n, 1);
            mbarrier_init(at.q_free + 8 * n, 2 * WARPS);
        }
        for (int n = 0; n < 2; n++) {
            mbarrier_init(at.told_full + 8 * n, 1);
            mbarrier_init(at.told_free + 8 * n, TOLD_IN_PAIR);
            mbarrier_init(at.d_s_full + 8 * n, WARPS / 2);
            mbarrier_init(at.d_s_free + 8 * n, 2 * WARPS);
        }
        for (int n = 0; n < WARPS / 2; n++) {
            mbarrier_init(at.weights_full + 8 * n, 1);
            mbarrier_init(at.weights_free + 8 * n, 1);
        }
        fence_mbarrier_init();
    }
    cluster_sync();
    if (threadIdx.x < 128) {
        setmaxnreg_dec<BRING_REGISTERS>();
        if (threadIdx.x == 0) bring(q_map, k_map, v_map, p, at, rank);
        if (threadIdx.x == 32) bring_others(d_o_map, p, at);
    } else {
        setmaxnreg_inc<GROUP_REGISTERS>();
        const int group = alike(int(threadIdx.x >> 7)) - 1, lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
        Turn turn;
        Told told;
        uint keys = 0;
        while (true) {
            const int number = next_in_pair(told, at);
            if (number >= p.last) break;
            const Tile tile = tile_of(p, number);
            if (is_none(p, tile)) continue;
            const Span span = span_of(p, tile.batch);
            const Reach reach = with_large(p, reach_of(p, span, tile.block));
            const Walked of = {p, captured, at, tile, span, reach, group, warp, lane};
            mbarrier_wait_parity(at.kv_full, keys);
            keys ^= 1;
            zero_keys(of);
            if (group == 0) {
                float dv[DV];
#pragma unroll
                for (int n = 0; n < DV; n++) dv[n] = 0.0f;
                walk_for_values(dv, turn, of);
                gradients_out<0>(dv, 1.0f, at.v, dv_map, V_THERE, of);
            } else {
                float dk[DK];
#pragma unroll
                for (int n = 0; n < DK; n++) dk[n] = 0.0f;
                walk_for_keys(dk, gradients, turn, of);
                gradients_out<1>(dk, p.scale, at.k, dk_map, QK_THERE, of);
            }
        }
        if (lane == 0) cp_async_bulk_wait_group_read();
    }
    // What the other block copies here, and arrives at, is there until then.
    cluster_sync();
}
