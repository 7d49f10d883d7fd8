// Which blocks of keys a tile of queries walks over, and which of them need the mask.

// A list is a tile's, and has blocks of keys.
#define OUTER_BLOCKS(p) ((p).tiles)
#define INNER_BLOCKS(p) (((p).seq_kv + TILE_N - 1) / TILE_N)
#define DESCENDING true

// Blocks of keys of a tile: those that hold anything, low <= block < high, and of these those whose every pair is kept, as far as band, prefix and
// lengths go.
struct BlockRange {
    int begin, end;
    int full_begin, full_end;
};

inline BlockRange block_range_of(const Params& p, const SeqInfo& s, int tile) {
    // The ends of what is kept grow with the query.
    const int first_q = tile * TILE_M, last_q = min(first_q + TILE_M, s.len_q) - 1;
    const Range first = attended_keys(p, s, first_q), last = attended_keys(p, s, last_q);
    BlockRange r;
    r.begin = first.begin / TILE_N;
    r.end = last_q < first_q || last.end <= first.begin ? r.begin : (last.end + TILE_N - 1) / TILE_N;
    r.full_begin = (last.begin + TILE_N - 1) / TILE_N;
    // Of queries behind the last one nothing is kept: what their rows come to is dropped.
    r.full_end = first.end / TILE_N;
    return r;
}

// The blocks, the last first.
struct BlockIterator {
    int at;
    int end;
};

inline BlockIterator block_iterator(const Params& p, const BlockRange& r, int batch, int head, int tile) {
#if WITH_BLOCK_LISTS
    const int row = (batch * p.map_batch + head * p.map_head) * p.tiles + tile;
    return BlockIterator{int(p.map_begin[row]), int(p.map_end[row])};
#else
    return BlockIterator{r.end, r.begin};
#endif
}

// The next block, and whether the mask is needed; false where there is none.
inline bool next_block(BlockIterator& iterator, const Params& p, const BlockRange& r, int& block, bool& partial) {
#if WITH_BLOCK_LISTS
    while (iterator.at < iterator.end) {
        const uint item = p.map_blocks[iterator.at++];
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
