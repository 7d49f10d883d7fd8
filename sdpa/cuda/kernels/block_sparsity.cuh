// attention_block_lists writes block-sparse index lists for masks that read tensors, before each call. kv_blocks.cuh and q_blocks.cuh read the lists.

// Evaluates the mask over a block, one query at a time. Returns 0 for an empty, 1 for a full, 2 for a partial block. Stops once an attended and a
// masked-out pair have been seen.
inline uint classify_block(const Params& p, const Captured& captured, int batch, int head, int first_q, int first_k) {
    const int lane = threadIdx.x & 31, past_q = min(first_q + TILE_M, p.seq_q), past_k = min(first_k + TILE_N, p.seq_kv);
    bool any = false, all = true;
    for (int q = first_q; q < past_q; q++) {
        bool attended = false, masked_out = false;
        for (int k = first_k + lane; k < past_k; k += 32) {
            const bool keeps = keep(Place{batch, head, q, k}, captured);
            attended |= keeps;
            masked_out |= !keeps;
        }
        any |= __any_sync(~0u, attended);
        all &= !__any_sync(~0u, masked_out);
        if (any && !all) break;
    }
    return any ? all ? 1u : 2u : 0u;
}

// Each CTA writes one list; its 32 warps classify 32 blocks at a time.
extern "C" __global__ void __launch_bounds__(1024, 1) attention_block_lists(const __grid_constant__ Params p, const __grid_constant__ Captured captured) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint states = shared_address(memory);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.x;
    const int outer = row % OUTER_BLOCKS(p), heads = p.block_list_head ? p.heads_q : 1;
    const int head = row / OUTER_BLOCKS(p) % heads, batch = row / OUTER_BLOCKS(p) / heads;
    // The lists ignore per-sequence lengths, so that sequences can share a list. Iteration over a list skips blocks past the lengths (next_block).
    const BlockRange range = block_range_of(p, SeqInfo{p.lower, p.upper, p.seq_q, p.seq_kv}, outer);
    uint* const items = const_cast<uint*>(p.block_list) + long(row) * INNER_BLOCKS(p);
    uint count = 0;
    for (int from = 0; from < range.end - range.begin; from += 32) {
        // List blocks in the order of iteration: KV blocks descending, query tiles ascending.
        const int mine = DESCENDING ? range.end - 1 - from - warp : range.begin + from + warp;
        uint state = 0;
        if (from + warp < range.end - range.begin)
            state = classify_block(p, captured, batch, head, (DESCENDING ? outer : mine) * TILE_M, (DESCENDING ? mine : outer) * TILE_N);
        if (lane == 0) st_shared(states + 4 * warp, state);
        __syncthreads();
        if (warp == 0) {
            const uint lane_state = ld_shared(states + 4 * lane);
            const uint listed = __ballot_sync(~0u, lane_state != 0);
            const int item = DESCENDING ? range.end - 1 - from - lane : range.begin + from + lane;
            if (lane_state != 0) items[count + __popc(listed & ((1u << lane) - 1))] = uint(item) | (lane_state == 2 ? PARTIAL_BLOCK : 0u);
            count += __popc(listed);
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        const_cast<uint*>(p.block_list_begin)[row] = uint(row) * uint(INNER_BLOCKS(p));
        const_cast<uint*>(p.block_list_end)[row] = uint(row) * uint(INNER_BLOCKS(p)) + count;
    }
}
