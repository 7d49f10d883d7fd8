// The list of tiles, made at each call where documents have any number of them, or tiles any number of keys.

// Tiles of queries that a batch entry has.
inline int tiles_of(const Params& p, const Span& s) {
    return WITH_PACKED_Q ? (s.len_q + TILE_M - 1) / TILE_M : p.tiles;
}

inline int sum_of_warp(int x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

// Blocks of keys that a tile meets.
inline int blocks_of(const Params& p, const Span& s, int tile) {
    const Reach r = reach_of(p, s, tile);
    return r.high - r.low;
}

// Blocks of keys of a batch entry, over all tiles of a head.
inline int blocks_of_entry(const Params& p, int entry) {
    const Span s = span_of(p, entry);
    int blocks = 0;
    for (int tile = 0; tile < tiles_of(p, s); tile++) blocks += blocks_of(p, s, tile);
    return blocks;
}

// Parts of a tile that meets so many blocks, each of about as many as `most`.
inline int parts_of(int blocks, int most) {
    return max(1, (blocks + most - 1) / most);
}

// What comes first is the longest: by its keys where they are counted, otherwise by its queries.
inline int length_of(const Params& p, int entry) {
#if WITH_PARTS
    return blocks_of_entry(p, entry);
#else
    return tiles_of(p, span_of(p, entry));
#endif
}

// Items of a batch entry.
inline int items_of(const Params& p, int entry, int most) {
    const Span s = span_of(p, entry);
    const int tiles = tiles_of(p, s);
#if WITH_PARTS
    int items = 0;
    for (int tile = 0; tile < tiles; tile++) items += parts_of(blocks_of(p, s, tile), most);
    return items;
#else
    return tiles;
#endif
}

// The most blocks of a part: as many as give all multiprocessors something to do, and not so few that merging costs more.
inline int most_blocks(const Params& p, int lane) {
#if WITH_PARTS
    int blocks = 0;
    for (int entry = lane; entry < p.batch; entry += 32) blocks += blocks_of_entry(p, entry);
    return max(LEAST_BLOCKS, int((long(sum_of_warp(blocks)) * p.units + p.most_parts - 1) / p.most_parts));
#else
    return 1;
#endif
}

// Lists the tiles of each batch entry: the longest entry first, of each the tiles with the most keys of causal masks first. A warp has an entry.
extern "C" __global__ void __launch_bounds__(256, 1) attention_tiles(const __grid_constant__ Params p) {
    const int lane = threadIdx.x & 31, mine = int(blockIdx.x) * 8 + int(threadIdx.x >> 5);
    if (mine >= p.batch) return;
    const int most = most_blocks(p, lane), own = length_of(p, mine);
    // Those of entries that come before, and of all.
    int before = 0, all = 0;
    for (int other = lane; other < p.batch; other += 32) {
        const int items = items_of(p, other, most), length = length_of(p, other);
        all += items;
        if (length > own || (length == own && other < mine)) before += items;
    }
    before = sum_of_warp(before);
    all = sum_of_warp(all);
    const Span s = span_of(p, mine);
    const int tiles = tiles_of(p, s);
    // Documents that overlap may have more than there is room for.
#if WITH_PARTS
    for (int tile = tiles - 1; tile >= 0; tile--) {
        const int parts = parts_of(blocks_of(p, s, tile), most);
        if (lane == 0) p.firsts[mine * p.tiles + tile] = before;
        for (int part = lane; part < parts && before + part < p.most_items; part += 32) p.items[before + part] = Item{mine, tile, part, parts};
        before += parts;
    }
#else
    for (int n = lane; n < tiles && before + n < p.most_items; n += 32) p.items[before + n] = Item{mine, tiles - 1 - n, 0, 1};
#endif
    if (mine == 0 && lane == 0) {
        p.taken[0] = 0;
        p.taken[1] = min(all, p.most_items);
    }
}
