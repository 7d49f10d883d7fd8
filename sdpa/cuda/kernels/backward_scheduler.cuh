// Tile scheduler of the sm_90 backward kernels: order of KV blocks, and the ring of dQ accumulators. KV heads form L2 sections. A section's dQ
// accumulator stays in L2 from zeroing to conversion; another section then reuses its memory.

// Returns the number of CTAs that share a KV block. Each CTA processes some of the query heads of the GQA group.
inline int head_splits_of(const Params& p) {
    return WITH_HEAD_SPLITS ? p.head_splits : 1;
}

inline int kv_head_count(const Params& p) {
    return p.batch * (p.heads_q / p.group);
}

// Returns the number of KV heads in a section.
inline int section_heads(const Params& p, int section) {
    return min(p.section_heads, kv_head_count(p) - section * p.section_heads);
}

// Returns the number of tiles in a section.
inline int section_tiles(const Params& p, int section) {
    return section_heads(p, section) * p.blocks * head_splits_of(p);
}

// Returns the number of dQ slices in a section.
inline int section_slices(const Params& p, int section) {
    return section_heads(p, section) * p.group * p.tiles * SLICES;
}

// Returns the tile of a tile index. Within a section, the first KV blocks of all heads come first, since they have the most queries under a causal mask.
inline Tile tile_at(const Params& p, int tile_index) {
    const int shares = head_splits_of(p), kv_part = tile_index / shares, block = kv_part / COLUMN_PARTS;
    const int section = block / (p.section_heads * p.blocks), together = section_heads(p, section);
    const int in_section = block - section * p.section_heads * p.blocks, unit = in_section % together, kv_head = section * p.section_heads + unit;
    const int heads_kv = p.heads_q / p.group, slot = p.ring_sections > 0 ? section % p.ring_sections * p.section_heads + unit : 0;
    return Tile{in_section / together, kv_head / heads_kv, kv_head % heads_kv, kv_part % COLUMN_PARTS, tile_index - kv_part * shares, kv_part, section, slot};
}

// Returns whether a packed sequence ends before this block. Shorter sequences have such blocks, because each gets as many work items as the longest one.
inline bool is_empty(const Params& p, const Tile& tile) {
    return WITH_PACKED_KV && tile.block * TILE_N >= seq_info_of(p, tile.batch).len_kv;
}

// Returns the address of an accumulator slice of a query tile: in the ring of sections, or, without a ring, in an accumulator of all tiles.
inline float* dq_slice(const Params& p, const SeqInfo& seq_info, const Tile& tile, int head, int queries, int slice) {
    const long index = p.ring_sections > 0 ? (long(tile.slot) * p.group + head - tile.head * p.group) * p.tiles + queries
                                  : q_tile_index(p, seq_info, tile.batch, head, queries);
    return p.dq_accum + (index * SLICES + slice) * DQ_SLICE;
}

// TMA store of 16 rows of a panel, as far as the packed sequence has rows and the tensor has panels.
template <bool packed>
inline void tma_store_rows(uint from, const TensorMap& map, int panel, int panels, int row, int begin, int length, int head, int batch) {
#if WITH_PACKED_Q || WITH_PACKED_KV
    if (packed) {
        const VarlenBox box = varlen_box<16>(begin, length, row);
        if (row < length && panel < panels) tma_store<true>(from, map, panel * PANEL, box.row_offset, head, box.end);
        return;
    }
#endif
    tma_store<true>(from, map, panel * PANEL, row, head, batch);
}

// Position in a ring of two slots through which the producer passes tile indices.
struct TilePipeline {
    int count = 0;
    inline uint slot(const SharedStorage& smem) const { return smem.tile_slots + 4 * (count & 1); }
    inline uint full(const SharedStorage& smem) const { return smem.tile_full + 8 * (count & 1); }
    inline uint empty(const SharedStorage& smem) const { return smem.tile_empty + 8 * (count & 1); }
    inline uint phase() const { return count >> 1 & 1; }
};

// Returns the next tile index. Called by whole warps.
inline int tile_consume(TilePipeline& tile_pipeline, const SharedStorage& smem) {
    mbarrier_wait_parity(tile_pipeline.full(smem), tile_pipeline.phase());
    const int tile_index = warp_uniform(int(ld_shared(tile_pipeline.slot(smem))));
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(tile_pipeline.empty(smem));
    tile_pipeline.count++;
    return tile_index;
}

// The producer thread pulls the next index from the counter and passes it on.
inline int tile_produce(TilePipeline& tile_pipeline, const Params& p, const SharedStorage& smem) {
    mbarrier_wait_parity(tile_pipeline.empty(smem), tile_pipeline.phase() ^ 1);
    const int tile_index = atomicAdd(p.tile_counter, 1);
    st_shared(tile_pipeline.slot(smem), uint(tile_index));
    mbarrier_arrive(tile_pipeline.full(smem));
    tile_pipeline.count++;
    return tile_index;
}
