// The list of tiles, made at each call where documents have any number of them, or tiles any number of keys.

// Tiles of queries that a batch entry has.
inline int tile_count_of(const Params& p, const SeqInfo& s) {
    return WITH_PACKED_Q ? (s.len_q + TILE_M - 1) / TILE_M : p.tiles;
}

inline int warp_sum(int x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

// Blocks of keys that a tile meets.
inline int block_count_of(const Params& p, const SeqInfo& s, int tile) {
    const BlockRange r = block_range_of(p, s, tile);
    return r.end - r.begin;
}

// Blocks of keys of a batch entry, over all tiles of a head.
inline int block_count_of_sequence(const Params& p, int entry) {
    const SeqInfo s = seq_info_of(p, entry);
    int blocks = 0;
    for (int tile = 0; tile < tile_count_of(p, s); tile++) blocks += block_count_of(p, s, tile);
    return blocks;
}

// Parts of a tile that meets so many blocks, each of about as many as `most`.
inline int split_count_of(int blocks, int max_blocks) {
    return max(1, (blocks + max_blocks - 1) / max_blocks);
}

// What comes first is the longest: by its keys where they are counted, otherwise by its queries.
inline int sort_key_of(const Params& p, int entry) {
#if WITH_SPLIT_KV
    return block_count_of_sequence(p, entry);
#else
    return tile_count_of(p, seq_info_of(p, entry));
#endif
}

// Items of a batch entry.
inline int item_count_of(const Params& p, int entry, int max_blocks) {
    const SeqInfo s = seq_info_of(p, entry);
    const int tiles = tile_count_of(p, s);
#if WITH_SPLIT_KV
    int items = 0;
    for (int tile = 0; tile < tiles; tile++) items += split_count_of(block_count_of(p, s, tile), max_blocks);
    return items;
#else
    return tiles;
#endif
}

// The most blocks of a part: as many as give all multiprocessors something to do, and not so few that merging costs more.
inline int max_blocks_per_split(const Params& p, int lane) {
#if WITH_SPLIT_KV
    int blocks = 0;
    for (int entry = lane; entry < p.batch; entry += 32) blocks += block_count_of_sequence(p, entry);
    return max(MIN_BLOCKS_PER_SPLIT, int((long(warp_sum(blocks)) * p.units + p.most_parts - 1) / p.most_parts));
#else
    return 1;
#endif
}

// Lists the tiles of each batch entry: the longest entry first, of each the tiles with the most keys of causal masks first. A warp has an entry.
extern "C" __global__ void __launch_bounds__(256, 1) attention_tile_list(const __grid_constant__ Params p) {
    const int lane = threadIdx.x & 31, mine = int(blockIdx.x) * 8 + int(threadIdx.x >> 5);
    if (mine >= p.batch) return;
    const int max_blocks = max_blocks_per_split(p, lane), own_key = sort_key_of(p, mine);
    // Those of entries that come before, and of all.
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
    // Documents that overlap may have more than there is room for.
#if WITH_SPLIT_KV
    for (int tile = tiles - 1; tile >= 0; tile--) {
        const int splits = split_count_of(block_count_of(p, s, tile), max_blocks);
        if (lane == 0) p.firsts[mine * p.tiles + tile] = before;
        for (int split = lane; split < splits && before + split < p.most_items; split += 32) p.items[before + split] = TileItem{mine, tile, split, splits};
        before += splits;
    }
#else
    for (int n = lane; n < tiles && before + n < p.most_items; n += 32) p.items[before + n] = TileItem{mine, tiles - 1 - n, 0, 1};
#endif
    if (mine == 0 && lane == 0) {
        p.taken[0] = 0;
        p.taken[1] = min(all, p.most_items);
    }
}
