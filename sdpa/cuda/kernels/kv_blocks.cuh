// KV blocks of a query tile: which ones the tile iterates over, last block first, and which of them are partial. Called by the forward kernels and the
// sm_80 dQ kernel.

// block_sparsity.cuh makes a list of KV blocks for each query tile.
#define OUTER_BLOCKS(p) ((p).tiles)
#define INNER_BLOCKS(p) (((p).seq_kv + TILE_N - 1) / TILE_N)
#define DESCENDING true

// Blocks [begin, end) with any attended pair, and of these the full ones [full_begin, full_end), by band, prefix and lengths.
struct BlockRange {
    int begin, end;
    int full_begin, full_end;
};

inline BlockRange block_range_of(const Params& p, const SeqInfo& s, int tile) {
    // Both ends of the attended range grow with the query: the first and the last query of the tile decide.
    const int first_q = tile * TILE_M, last_q = min(first_q + TILE_M, s.len_q) - 1;
    const Range first = attended_keys(p, s, first_q), last = attended_keys(p, s, last_q);
    BlockRange r;
    r.begin = first.begin / TILE_N;
    r.end = last_q < first_q || last.end <= first.begin ? r.begin : (last.end + TILE_N - 1) / TILE_N;
    r.full_begin = (last.begin + TILE_N - 1) / TILE_N;
    // Queries past the last one attend to nothing; their rows are not written.
    r.full_end = first.end / TILE_N;
    return r;
}

// Descending: `at` counts down to `end`. With block lists, indices into the list.
struct BlockIterator {
    int at;
    int end;
};

inline BlockIterator block_iterator(const Params& p, const BlockRange& r, int batch, int head, int tile) {
#if WITH_BLOCK_LISTS
    const int row = (batch * p.block_list_batch + head * p.block_list_head) * p.tiles + tile;
    return BlockIterator{int(p.block_list_begin[row]), int(p.block_list_end[row])};
#else
    return BlockIterator{r.end, r.begin};
#endif
}

// Advances to the next block; returns false after the last. `partial`: the block needs the mask.
inline bool next_block(BlockIterator& iterator, const Params& p, const BlockRange& r, int& block, bool& partial) {
#if WITH_BLOCK_LISTS
    while (iterator.at < iterator.end) {
        const uint item = p.block_list[iterator.at++];
        block = int(item & ~PARTIAL_BLOCK);
        if (block >= r.begin && block < r.end) {
            partial = (item & PARTIAL_BLOCK) != 0 || block < r.full_begin || block >= r.full_end;
            return true;
        }
    }
    return false;
#else
    if (iterator.at <= iterator.end) return false;
    block = --iterator.at;
    partial = block < r.full_begin || block >= r.full_end;
    return true;
#endif
}
