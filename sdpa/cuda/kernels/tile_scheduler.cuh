// Which tiles there are, in which order they are taken, and where their rows lie.

// Rows of a tile are its heads' queries, head after head; where queries are few, rows behind them are left over.
constexpr int CTA_ROWS = 64 * CONSUMER_WARPGROUPS, TILE_ROWS = TILE_M * PACKED_HEADS;
constexpr float LN_2 = 0.69314718055994530942f;
constexpr float LOG2_E = 1.44269504088896340736f;
#define INFINITE __int_as_float(0x7f800000)

// A tile of queries of heads that share keys: the first of the heads; which part of the keys it meets, of how many, and where the sums of parts go.
struct Tile {
    int tile, batch, head;
    int split, splits, slot;
    uint smem_address;  // where it is told of in shared memory, if it is
};

// How many tiles a head has, of one batch entry, or of all where a list has them: of documents and parts this is known on the device alone.
inline int tiles_per_head(const Params& p) {
#if WITH_TILE_LIST
    return p.taken[1];
#else
    return p.tiles;
#endif
}

// Heads, or groups of heads that share a tile, that have so many tiles.
inline int head_count(const Params& p) {
    return WITH_TILE_LIST ? p.units : p.batch * p.units;
}

// The first query head of such a group.
inline int first_head(const Params& p, int unit) {
    return PACK_GQA ? unit / p.head_tiles * p.group + unit % p.head_tiles * PACKED_HEADS : unit;
}

// Heads whose keys and values fit the cache together follow one another; of these, tiles with the most keys of causal masks come first.
inline Tile tile_at(const Params& p, int tiles, int tile_index) {
    const int first = tile_index / (p.section * tiles) * p.section, together = min(p.section, head_count(p) - first);
    const int in_section = tile_index - first * tiles;
    const int head_index = first + in_section % together;
#if WITH_TILE_LIST
    const int at = in_section / together;
    const TileItem item = p.items[at];
    return Tile{item.tile, item.batch, first_head(p, head_index), item.split, item.splits, at * p.units + head_index, 0};
#else
    return Tile{tiles - 1 - in_section / together, head_index / p.units, first_head(p, head_index % p.units), 0, 1, 0, 0};
#endif
}

// The tiles that are told of at once, and the bytes of each: a number, or of a list all that is known of it, so that it is looked up once for a block of threads.
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

// What band and lengths say of a tile's batch entry.
inline SeqInfo seq_info_of_tile(const Params& p, const Tile& tile) {
#if WITH_TILE_LIST
    const auto word = [&](int n) { return int(ld_shared(tile.smem_address + 4 * n)); };
    return align_to_ends(p, SeqInfo{p.lower, p.upper, word(7), word(9), word(6), word(8)});
#else
    return seq_info_of(p, tile.batch);
#endif
}

// The blocks of keys that a tile meets.
inline BlockRange block_range_of_tile(const Params& p, const SeqInfo& s, const Tile& tile) {
    BlockRange r = block_range_of(p, s, tile.tile);
#if WITH_SPLIT_KV
    const int each = (r.end - r.begin + tile.splits - 1) / tile.splits, begin = r.begin + tile.split * each;
    r.end = min(r.end, begin + each);
    r.begin = min(begin, r.end);
#endif
    return r;
}

// The query of a row of a tile, and its head.
inline int query_of_row(const Tile& tile, int row) {
    return tile.tile * TILE_M + (PACK_GQA ? row % TILE_M : row);
}

inline int head_of_row(const Tile& tile, int row) {
    return PACK_GQA ? tile.head + row / TILE_M : tile.head;
}

// Whether results have such a row.
inline bool has_row(const Params& p, const SeqInfo& s, const Tile& tile, int row) {
    const bool headed = !PACK_GQA || (row < TILE_ROWS && head_of_row(tile, row) / p.group == tile.head / p.group);
    return headed && query_of_row(tile, row) < rows_q(p, s);
}

#if PACK_GQA || WITH_SPLIT_KV
// The output of a query.
inline unsigned short* output_row(const Params& p, const SeqInfo& s, int batch, int head, int q) {
    return (unsigned short*)p.o + (WITH_PACKED_Q ? 0 : batch * p.o_batch) + head * p.o_head + long(s.begin_q + q) * p.o_row;
}

// Two columns of an output, as far as it has them.
inline void store_pair(const Params& p, unsigned short* to, int column, uint both) {
    if (column + 1 < p.dim_v) *(uint*)(to + column) = both;
    else if (column < p.dim_v) to[column] = (unsigned short)both;
}
#endif
