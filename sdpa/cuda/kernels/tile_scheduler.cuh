// Tile scheduler of the sm_90 forward kernel: order of tiles, and the rows of a tile. The producer pulls tile indices from an atomic counter.
// combine.cuh also uses the arithmetic of rows.

// Packed GQA: a tile's rows are the queries of PACKED_HEADS heads, head after head; CTA_ROWS - TILE_ROWS rows are padding.
constexpr int CTA_ROWS = 64 * CONSUMER_WARPGROUPS, TILE_ROWS = TILE_M * PACKED_HEADS;
constexpr float LN_2 = 0.69314718055994530942f;
constexpr float LOG2_E = 1.44269504088896340736f;
#define INFINITE __int_as_float(0x7f800000)

// A query tile of sequence `batch` and of query head `head`; with packed GQA, `head` is the first of the tile's heads. With split-KV it stands for split
// `split` of `splits`, whose results are stored at `slot`.
struct Tile {
    int tile, batch, head;
    int split, splits, slot;
    uint smem_address;  // with a tile list: address of the tile's slot
};

// Returns the number of tiles per head: of one sequence, or, with a tile list, of all sequences together. Only the device knows the length of the list.
inline int tiles_per_head(const Params& p) {
#if WITH_TILE_LIST
    return p.tile_counter[1];
#else
    return p.tiles;
#endif
}

// Returns the number of heads (packed GQA: of groups of heads that share tiles), each of which has tiles_per_head() tiles.
inline int head_count(const Params& p) {
    return WITH_TILE_LIST ? p.head_groups : p.batch * p.head_groups;
}

// Returns the first query head of head group `unit`; without packed GQA a group is one head.
inline int first_head(const Params& p, int unit) {
    return PACK_GQA ? unit / p.head_tiles * p.group + unit % p.head_tiles * PACKED_HEADS : unit;
}

inline Tile tile_at(const Params& p, int tiles, int tile_index) {
    const ScheduledTile scheduled = scheduled_tile(p, tiles, tile_index);
    const int head_index = scheduled.head_index, at = scheduled.position;
#if WITH_TILE_LIST
    const TileItem item = p.tile_items[at];
    return Tile{item.tile, item.batch, first_head(p, head_index), item.split, item.splits, at * p.head_groups + head_index, 0};
#else
    return Tile{tiles - 1 - at, head_index / p.head_groups, first_head(p, head_index % p.head_groups), 0, 1, 0, 0};
#endif
}

// Number of slots through which the producer passes tiles to the consumers. With a tile list a slot holds the whole tile, because only the producer reads
// the list.
constexpr int TILE_SLOTS = WITH_TILE_LIST ? 4 : 2;
constexpr uint TILE_SLOT_BYTES = WITH_TILE_LIST ? 48 : 4;

#if WITH_TILE_LIST
inline void store_tile(uint to, const Tile& t, const SeqInfo& s) {
    const int words[] = {t.tile, t.batch, t.head, t.split, t.splits, t.slot, s.begin_q, s.len_q, s.begin_kv, s.len_kv};
#pragma unroll
    for (int n = 0; n < 10; n++) st_shared(to + 4 * n, uint(words[n]));
}

inline Tile load_tile(uint at) {
    int words[6];
#pragma unroll
    for (int n = 0; n < 6; n++) words[n] = warp_uniform(int(ld_shared(at + 4 * n)));
    return Tile{words[0], words[1], words[2], words[3], words[4], words[5], at};
}
#endif

// Returns the band and lengths of the tile's sequence. With a tile list the lengths are read from the tile's slot in shared memory.
inline SeqInfo seq_info_of_tile(const Params& p, const Tile& tile) {
#if WITH_TILE_LIST
    const auto word = [&](int n) { return int(ld_shared(tile.smem_address + 4 * n)); };
    return align_to_ends(p, SeqInfo{p.lower, p.upper, word(7), word(9), word(6), word(8)});
#else
    return seq_info_of(p, tile.batch);
#endif
}

// Returns the KV blocks of the tile, or with split-KV those of the tile's split.
inline BlockRange block_range_of_tile(const Params& p, const SeqInfo& s, const Tile& tile) {
    BlockRange r = block_range_of(p, s, tile.tile);
#if WITH_SPLIT_KV
#if FIXED_SPLIT
    const int first = (r.begin / FIXED_SPLIT + tile.split) * FIXED_SPLIT;
    r.end = min(r.end, first + FIXED_SPLIT);
    r.begin = max(r.begin, first);
#else
    const int each = (r.end - r.begin + tile.splits - 1) / tile.splits, begin = r.begin + tile.split * each;
    r.end = min(r.end, begin + each);
    r.begin = min(begin, r.end);
#endif
#endif
    return r;
}

// Return the query and the head of a row of the tile.
inline int query_of_row(const Tile& tile, int row) {
    return tile.tile * TILE_M + (PACK_GQA ? row % TILE_M : row);
}

inline int head_of_row(const Tile& tile, int row) {
    return PACK_GQA ? tile.head + row / TILE_M : tile.head;
}

// Returns false for padding rows of packed GQA and for rows past the end of the output.
inline bool has_row(const Params& p, const SeqInfo& s, const Tile& tile, int row) {
    const bool headed = !PACK_GQA || (row < TILE_ROWS && head_of_row(tile, row) / p.group == tile.head / p.group);
    return headed && query_of_row(tile, row) < rows_q(p, s);
}

#if PACK_GQA || WITH_SPLIT_KV
// Returns the address of a query's output row.
inline unsigned short* output_row(const Params& p, const SeqInfo& s, int batch, int head, int q) {
    return (unsigned short*)p.o + (WITH_PACKED_Q ? 0 : batch * p.o_batch) + head * p.o_head + long(s.begin_q + q) * p.o_row;
}

// Stores two columns, as far as the output has them.
inline void store_pair(const Params& p, unsigned short* to, int column, uint both) {
    if (column + 1 < p.dim_v) *(uint*)(to + column) = both;
    else if (column < p.dim_v) to[column] = (unsigned short)both;
}
#endif
