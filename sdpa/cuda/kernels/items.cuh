// The list of tiles, made at each call where documents have any number of them.

// Tiles of queries that a document has.
inline int tiles_of(const Params& p, int document) {
    return (span_of(p, document).len_q + TILE_M - 1) / TILE_M;
}

inline int sum_of_warp(int x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

// Lists the tiles that documents have: documents with the most first, of each the tiles with the most keys of causal masks first. A warp has a document.
extern "C" __global__ void __launch_bounds__(256, 1) attention_tiles(const __grid_constant__ Params p) {
    const int lane = threadIdx.x & 31, mine = int(blockIdx.x) * 8 + int(threadIdx.x >> 5);
    if (mine >= p.batch) return;
    const int own = tiles_of(p, mine);
    // Those of documents that come before, and of all.
    int before = 0, all = 0;
    for (int other = lane; other < p.batch; other += 32) {
        const int tiles = tiles_of(p, other);
        all += tiles;
        if (tiles > own || (tiles == own && other < mine)) before += tiles;
    }
    before = sum_of_warp(before);
    all = sum_of_warp(all);
    // Documents that overlap may have more than there is room for.
    for (int n = lane; n < own && before + n < p.most_items; n += 32) p.items[before + n] = Item{mine, own - 1 - n};
    if (mine == 0 && lane == 0) {
        p.taken[0] = 0;
        p.taken[1] = min(all, p.most_items);
    }
}
