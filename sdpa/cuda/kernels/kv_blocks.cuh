// KV blocks of a query tile: which blocks the tile iterates over, in descending order, and which of them are partial. The forward kernels and the sm_80
// dQ kernel use this.

// block_sparsity.cuh makes a list of KV blocks for each query tile.
#define OUTER_BLOCKS(p) ((p).tiles)
#define INNER_BLOCKS(p) (((p).seq_kv + TILE_N - 1) / TILE_N)
#define DESCENDING true

// By band, prefix and lengths, blocks [begin, end) contain attended (query, key) pairs. Of these, blocks [full_begin, full_end) are full: all their pairs
// are attended.
struct BlockRange {
    int begin, end;
    int full_begin, full_end;
};

inline BlockRange block_range_of(const Params& p, const SeqInfo& s, int tile) {
    // Neither end of the range of attended keys decreases as the query increases, so the tile's first and last query determine the blocks.
    const int first_q = tile * TILE_M, last_q = min(first_q + TILE_M, s.len_q) - 1;
    const Range first = attended_keys(p, s, first_q), last = attended_keys(p, s, last_q);
    BlockRange r;
    r.begin = first.begin / TILE_N;
    r.end = last_q < first_q || last.end <= first.begin ? r.begin : (last.end + TILE_N - 1) / TILE_N;
    r.full_begin = (last.begin + TILE_N - 1) / TILE_N;
    // Rows past the last query do not make a block partial: they attend to nothing, but their results are discarded anyway.
    r.full_end = first.end / TILE_N;
    return r;
}

// Iterates in descending order: `at` counts down to `end`. With block lists, `at` and `end` are indices into the list, and `at` counts up.
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
