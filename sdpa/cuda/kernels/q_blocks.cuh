// Query tiles of a KV block: which tiles the block iterates over, in ascending order, and which of them are partial. The backward kernels whose CTAs
// each own a KV block use this.

// block_sparsity.cuh makes a list of query tiles for each KV block.
#define OUTER_BLOCKS(p) ((p).blocks)
#define INNER_BLOCKS(p) ((p).tiles)
#define DESCENDING false

// By band, prefix and lengths, tiles [begin, end) contain attended (query, key) pairs. Of these, tiles [full_begin, full_end) are full: all their pairs
// are attended.
struct BlockRange {
    int begin, end;
    int full_begin, full_end;
};

inline BlockRange block_range_of(const Params& p, const SeqInfo& s, int block) {
    const int first_k = block * TILE_N, last_k = min(first_k + TILE_N, s.len_kv) - 1;
    const Range first = attending_queries(p, s, first_k), last = attending_queries(p, s, last_k);
    BlockRange r;
    r.begin = first.begin / TILE_M;
    r.end = last_k < first_k || last.end <= first.begin ? r.begin : (last.end + TILE_M - 1) / TILE_M;
    r.full_begin = (last.begin + TILE_M - 1) / TILE_M;
    r.full_end = first_k + TILE_N > s.len_kv ? 0 : first.end / TILE_M;
    return r;
}

// Iterates in ascending order from `at` to `end`. With block lists, both are indices into the list.
struct BlockIterator {
    int at;
    int end;
};

inline BlockIterator block_iterator(const Params& p, const BlockRange& r, int batch, int head, int block) {
#if WITH_BLOCK_LISTS
    const int row = (batch * p.block_list_batch + head * p.block_list_head) * p.blocks + block;
    return BlockIterator{int(p.block_list_begin[row]), int(p.block_list_end[row])};
#else
    return BlockIterator{r.begin, r.end};
#endif
}

// Advances to the next tile; returns false after the last. `partial`: the tile needs the mask.
inline bool next_block(BlockIterator& iterator, const Params& p, const BlockRange& r, int& tile, bool& partial) {
#if WITH_BLOCK_LISTS
    while (iterator.at < iterator.end) {
        const uint item = p.block_list[iterator.at++];
        tile = int(item & ~PARTIAL_BLOCK);
        if (tile >= r.begin && tile < r.end) {
            partial = (item & PARTIAL_BLOCK) != 0 || tile < r.full_begin || tile >= r.full_end;
            return true;
        }
    }
    return false;
#else
    if (iterator.at >= iterator.end) return false;
    tile = iterator.at++;
    partial = tile < r.full_begin || tile >= r.full_end;
    return true;
#endif
}
