// Converts the dQ accumulator within attention_backward. Two warps per CTA load slices of a finished L2 section, scale and convert them, store dQ by TMA,
// and leave zeros for the section that reuses the slices.
// Tile indices past the last KV block stand for slices of the last sections.

// Slices [begin, end) of a section.
struct SliceRange {
    int section, begin, end;
};

// Returns the slices to convert at a tile index: a share of the section that is `p.conversion_lag` sections before the section of this index.
inline SliceRange slices_of(const Params& p, int tile_index) {
    const int beyond = tile_index - p.block_items, each = p.section_heads * p.blocks * head_splits_of(p);
    const int own = beyond < 0 ? tile_index / each : p.sections + beyond / p.conversion_items, section = own - p.conversion_lag;
    if (section < 0) return SliceRange{0, 0, 0};
    const int index = beyond < 0 ? tile_index - own * each : beyond % p.conversion_items, count = beyond < 0 ? section_tiles(p, own) : p.conversion_items;
    const int slices = section_slices(p, section), each_slices = (slices + count - 1) / count;
    return SliceRange{section, min(index * each_slices, slices), min(index * each_slices + each_slices, slices)};
}

// A slice of the dQ accumulator: its head, query tile, part and address. `keys` has the KV head and its slot in the ring.
struct Slice {
    Tile keys;
    int head, queries, part;
    float* sums;
};

inline Slice slice_of(const Params& p, int section, int n) {
    const int head_index = n / SLICES / p.tiles, unit = head_index / p.group, kv_head = section * p.section_heads + unit, heads_kv = p.heads_q / p.group;
    const Tile keys = {0, kv_head / heads_kv, kv_head % heads_kv, 0, 0, 0, section, p.ring_sections > 0 ? section % p.ring_sections * p.section_heads + unit : 0};
    const int head = keys.head * p.group + head_index % p.group, queries = n / SLICES % p.tiles, part = n % SLICES;
    return Slice{keys, head, queries, part, dq_slice(p, seq_info_of(p, keys.batch), keys, head, queries, part)};
}

// Returns the first of slices n, n + 2, n + 4, ... that has queries; `slices.end` if none has. The other converting warp has the slices between.
inline int next_slice(const Params& p, const SliceRange& slices, int n, Slice& slice) {
    for (; n < slices.end; n += 2) {
        slice = slice_of(p, slices.section, n);
        if (!WITH_PACKED_Q || slice.queries * TILE_M < seq_info_of(p, slice.keys.batch).len_q) return n;
    }
    return slices.end;
}

// Returns an element of the dQ accumulator as a number. A fixed-point sum contains `offset`.
inline float sum_of_dq(float bits, uint offset) { return FIXED_POINT_DQ ? __int2float_rn(int(__float_as_uint(bits) - offset)) : bits; }

// Converts a piece of 16 rows by 64 columns from register order to swizzled rows for TMA. `scales` multiply the lane's two rows.
inline void convert_piece(const float (&scales)[2], uint offset, uint from, uint to) {
    const int lane = threadIdx.x & 31;
    const uint rows = to + (lane & 15) * ROW_BYTES + ((lane >> 4 ^ (lane & 7)) << 4);
    from += lane * 16;
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        const float4 one = ld_shared_v4_f32(from + n * 512), other = ld_shared_v4_f32(from + n * 512 + 512);
        const auto both = [&](float low, float high, int half) {
            return pack_pair(Element{}, sum_of_dq(low, offset) * scales[half], sum_of_dq(high, offset) * scales[half]);
        };
        stmatrix_x4(rows ^ n << 4, both(one.x, one.y, 0), both(one.z, one.w, 1), both(other.x, other.y, 0), both(other.z, other.w, 1));
    }
}

// Loads a piece to one of two buffers.
inline void load_piece(uint pieces, uint full, const float* sums, int n) {
    mbarrier_arrive_expect_tx(full + 8 * (n & 1), DQ_PIECE_BYTES);
    cp_async_bulk_load(pieces + (n & 1) * DQ_PIECE_BYTES, sums + n * DQ_PIECE, DQ_PIECE_BYTES, full + 8 * (n & 1));
}

// Converts this warp's share of `slices`, which all belong to one tile index; `mine` is the warp's number among the converting warps. A slice has four
// pieces; loads run two pieces ahead, and continue into the next slice.
inline void convert_slices(const TensorMap& dq_map, const Params& p, const SharedStorage& smem, const SliceRange& slices, int mine) {
    const bool first = (threadIdx.x & 31) == 0, reused = p.ring_sections > 0 && slices.section + p.ring_sections < p.sections;
    const uint pieces = smem.dq_pieces + mine * DQ_CONVERT_BYTES, rounded = pieces + 2 * DQ_PIECE_BYTES, full = smem.dq_pieces_full + 16 * mine;
    Slice slice, next;
    int index = next_slice(p, slices, slices.begin + mine, slice);
    if (first) counter_acquire_wait(p.blocks_done + slices.section, section_tiles(p, slices.section));
    __syncwarp();
    if (first && index < slices.end) load_piece(pieces, full, slice.sums, 0), load_piece(pieces, full, slice.sums, 1);
    while (index < slices.end) {
        index = next_slice(p, slices, index + 2, next);
        const bool more = index < slices.end;
        const int first_row = slice.queries * TILE_M + (TILE_M == 128 ? slice.part * 64 : 0), panel = TILE_M == 128 ? 0 : slice.part;
#pragma unroll 1
        for (int n = 0; n < 4; n++) {
            const uint to = rounded + (n & 1) * 16 * ROW_BYTES;
            mbarrier_wait_parity(full + 8 * (n & 1), n >> 1);
            if (first) cp_async_bulk_wait_group_read<1>();
            __syncwarp();
            float scales[2] = {p.scale, p.scale};
            uint offset = 0;
#if FIXED_POINT_DQ
            const long query_tile = q_tile_index(p, seq_info_of(p, slice.keys.batch), slice.keys.batch, slice.head, slice.queries);
            offset = uint(__ldcg(p.dq_parts + query_tile)) * INTEGER_OFFSET_BITS;
            const float* const of_rows = p.dq_scale + query_tile * TILE_M + first_row % TILE_M + 16 * n + thread_row(threadIdx.x & 31);
            // Loads past the L1 cache: another CTA may have marked the row as NaN.
            for (int half = 0; half < 2; half++) scales[half] *= inverse_of_scale(__ldcg(of_rows + 8 * half));
#endif
            convert_piece(scales, offset, pieces + (n & 1) * DQ_PIECE_BYTES, to);
            fence_proxy_async();
            __syncwarp();
            if (!first) continue;
            if (n < 2 || more) load_piece(pieces, full, n < 2 ? slice.sums : next.sums, n ^ 2);
            const SeqInfo seq_info = seq_info_of(p, slice.keys.batch);
            tma_store_rows<WITH_PACKED_Q>(to, dq_map, panel, QK_TENSOR_PANELS, first_row + 16 * n, seq_info.begin_q, seq_info.len_q, slice.head, slice.keys.batch);
            if (reused) cp_async_bulk_store(slice.sums + n * DQ_PIECE, smem.zeros, DQ_PIECE_BYTES);
            cp_async_bulk_commit_group();
        }
        slice = next;
    }
    // Count this warp's slices as converted, including those without queries.
    if (first) {
        cp_async_bulk_wait_group();
        counter_release_add(p.slices_converted + slices.section, (slices.end - slices.begin + 1 - mine) / 2);
    }
}

inline void dq_convert_warp(const TensorMap& dq_map, const Params& p, const SharedStorage& smem) {
    const int mine = warp_uniform(int(threadIdx.x >> 5)) & 1;
    TilePipeline tile_pipeline;
    while (true) {
        const int tile_index = tile_consume(tile_pipeline, smem);
        if (tile_index >= p.all_items) break;
        const SliceRange slices = slices_of(p, tile_index);
        if (slices.begin < slices.end) convert_slices(dq_map, p, smem, slices, mine);
    }
    if ((threadIdx.x & 31) == 0) cp_async_bulk_wait_group_read();
}
