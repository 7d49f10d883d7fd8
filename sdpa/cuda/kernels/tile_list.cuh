// attention_tile_list writes the list of query tiles and their splits before each forward call of packed or split-KV problems. tile_scheduler.cuh reads
// the list.

// Returns the number of query tiles of a sequence.
inline int tile_count_of(const Params& p, const SeqInfo& s) {
    return WITH_PACKED_Q ? (s.len_q + TILE_M - 1) / TILE_M : p.tiles;
}

inline int warp_sum(int x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

// Returns the number of KV blocks of a query tile.
inline int block_count_of(const Params& p, const SeqInfo& s, int tile) {
    const BlockRange r = block_range_of(p, s, tile);
    return r.end - r.begin;
}

// Returns the number of KV blocks of a sequence, summed over all query tiles of a head.
inline int block_count_of_sequence(const Params& p, int entry) {
    const SeqInfo s = seq_info_of(p, entry);
    int blocks = 0;
    for (int tile = 0; tile < tile_count_of(p, s); tile++) blocks += block_count_of(p, s, tile);
    return blocks;
}

// Returns the number of splits of a tile: of fixed size, or with at most `max_blocks` KV blocks.
inline int split_count_of(const Params& p, const SeqInfo& s, int tile, int max_blocks) {
#if FIXED_SPLIT
    const BlockRange r = block_range_of(p, s, tile);
    return r.end <= r.begin ? 1 : (r.end - 1) / FIXED_SPLIT - r.begin / FIXED_SPLIT + 1;
#else
    return max(1, (block_count_of(p, s, tile) + max_blocks - 1) / max_blocks);
#endif
}

// Returns the length by which sequences are sorted in descending order: the number of KV blocks with split-KV, otherwise of query tiles.
inline int sort_key_of(const Params& p, int entry) {
#if WITH_SPLIT_KV
    return block_count_of_sequence(p, entry);
#else
    return tile_count_of(p, seq_info_of(p, entry));
#endif
}

// Returns the number of items that a sequence has in the tile list.
inline int item_count_of(const Params& p, int entry, int max_blocks) {
    const SeqInfo s = seq_info_of(p, entry);
    const int tiles = tile_count_of(p, s);
#if WITH_SPLIT_KV
    int items = 0;
    for (int tile = 0; tile < tiles; tile++) items += split_count_of(p, s, tile, max_blocks);
    return items;
#else
    return tiles;
#endif
}

// Returns the most KV blocks that a split may have: few enough that splits fill all SMs, but at least MIN_BLOCKS_PER_SPLIT, below which combining costs
// too much.
inline int max_blocks_per_split(const Params& p, int lane) {
#if WITH_SPLIT_KV && !FIXED_SPLIT
    int blocks = 0;
    for (int entry = lane; entry < p.batch; entry += 32) blocks += block_count_of_sequence(p, entry);
    return max(MIN_BLOCKS_PER_SPLIT, int((long(warp_sum(blocks)) * p.head_groups + p.max_splits - 1) / p.max_splits));
#else
    return 1;
#endif
}

// One warp per sequence. The list begins with the longest sequence. Within a sequence the last tiles come first, since they have the most keys under a
// causal mask.
extern "C" __global__ void __launch_bounds__(256, 1) attention_tile_list(const __grid_constant__ Params p) {
    const int lane = threadIdx.x & 31, mine = int(blockIdx.x) * 8 + int(threadIdx.x >> 5);
    if (mine >= p.batch) return;
    const int max_blocks = max_blocks_per_split(p, lane), own_key = sort_key_of(p, mine);
    // Count the list items of the sequences that precede this one in the list, and of all sequences.
    int before = 0, all = 0;
    for (int other = lane; other < p.batch; other += 32) {
        const int items = item_count_of(p, other, max_blocks), length = sort_key_of(p, other);
        all += items;
        if (length > own_key || (length == own_key && other < mine)) before += items;
    }
    before = warp_sum(before);
    all = warp_sum(all);
    const SeqInfo s = seq_info_of(p, mine);
    const int tiles = tile_count_of(p, s);
    // If sequences in cu_seqlens overlap, there can be more tiles than the list has room for. Tiles past `max_items` are dropped.
#if WITH_SPLIT_KV
    for (int tile = tiles - 1; tile >= 0; tile--) {
        const int splits = split_count_of(p, s, tile, max_blocks);
        if (lane == 0) p.first_items[mine * p.tiles + tile] = before;
        for (int split = lane; split < splits && before + split < p.max_items; split += 32) p.tile_items[before + split] = TileItem{mine, tile, split, splits};
        before += splits;
    }
#else
    for (int n = lane; n < tiles && before + n < p.max_items; n += 32) p.tile_items[before + n] = TileItem{mine, tiles - 1 - n, 0, 1};
#endif
    if (mine == 0 && lane == 0) {
        p.tile_counter[0] = 0;
        p.tile_counter[1] = min(all, p.max_items);
    }
}
