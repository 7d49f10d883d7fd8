// Which tiles there are, in which order they are taken, and where their rows lie.

// Rows of a tile are its heads' queries, head after head; where queries are few, rows behind them are left over.
constexpr int ROWS = 64 * GROUPS, TILE_ROWS = TILE_M * HEADS;
constexpr float LN_2 = 0.69314718055994530942f;
constexpr float LOG2_E = 1.44269504088896340736f;
#define INFINITE __int_as_float(0x7f800000)

// A tile of queries of heads that share keys: the first of the heads; which part of the keys it meets, of how many, and where the sums of parts go.
struct Tile {
    int tile, batch, head;
    int part, parts, slot;
    uint told;  // where it is told of in shared memory, if it is
};

// How many tiles a head has, of one batch entry, or of all where a list has them: of documents and parts this is known on the device alone.
inline int tiles_of_head(const Params& p) {
#if WITH_LIST
    return p.taken[1];
#else
    return p.tiles;
#endif
}

// Heads, or groups of heads that share a tile, that have so many tiles.
inline int all_heads(const Params& p) {
    return WITH_LIST ? p.units : p.batch * p.units;
}

// The first query head of such a group.
inline int first_head(const Params& p, int unit) {
    return FEW ? unit / p.head_tiles * p.group + unit % p.head_tiles * HEADS : unit;
}

// Heads whose keys and values fit the cache together follow one another; of these, tiles with the most keys of causal masks come first.
inline Tile tile_of(const Params& p, int tiles, int number) {
    const int first = number / (p.section * tiles) * p.section, together = min(p.section, all_heads(p) - first);
    const int in_section = number - first * tiles;
    const int both = first + in_section % together;
#if WITH_LIST
    const int at = in_section / together;
    const Item item = p.items[at];
    return Tile{item.tile, item.batch, first_head(p, both), item.part, item.parts, at * p.units + both, 0};
#else
    return Tile{tiles - 1 - in_section / together, both / p.units, first_head(p, both % p.units), 0, 1, 0, 0};
#endif
}

// The tiles that are told of at once, and the bytes of each: a number, or of a list all that is known of it, so that it is looked up once for a block of threads.
constexpr int TOLD = WITH_LIST ? 4 : 2;
constexpr uint TOLD_BYTES = WITH_LIST ? 48 : 4;

#if WITH_LIST
inline void tell(uint to, const Tile& t, const Span& s) {
    const int words[] = {t.tile, t.batch, t.head, t.part, t.parts, t.slot, s.begin_q, s.len_q, s.begin_kv, s.len_kv};
#pragma unroll
    for (int n = 0; n < 10; n++) st_shared(to + 4 * n, uint(words[n]));
}

inline Tile told_of(uint at) {
    int words[6];
#pragma unroll
    for (int n = 0; n < 6; n++) words[n] = alike(int(ld_shared(at + 4 * n)));
    return Tile{words[0], words[1], words[2], words[3], words[4], words[5], at};
}
#endif

// What band and lengths say of a tile's batch entry.
inline Span span_of_tile(const Params& p, const Tile& tile) {
#if WITH_LIST
    const auto word = [&](int n) { return int(ld_shared(tile.told + 4 * n)); };
    return about_the_ends(p, Span{p.lower, p.upper, word(7), word(9), word(6), word(8)});
#else
    return span_of(p, tile.batch);
#endif
}

// The blocks of keys that a tile meets.
inline Reach reach_of_tile(const Params& p, const Span& s, const Tile& tile) {
    Reach r = reach_of(p, s, tile.tile);
#if WITH_PARTS
    const int each = (r.high - r.low + tile.parts - 1) / tile.parts, low = r.low + tile.part * each;
    r.high = min(r.high, low + each);
    r.low = min(low, r.high);
#endif
    return r;
}

// The query of a row of a tile, and its head.
inline int query_of(const Tile& tile, int row) {
    return tile.tile * TILE_M + (FEW ? row % TILE_M : row);
}

inline int head_of(const Tile& tile, int row) {
    return FEW ? tile.head + row / TILE_M : tile.head;
}

// Whether results have such a row.
inline bool has_row(const Params& p, const Span& s, const Tile& tile, int row) {
    const bool headed = !FEW || (row < TILE_ROWS && head_of(tile, row) / p.group == tile.head / p.group);
    return headed && query_of(tile, row) < rows_q(p, s);
}

#if FEW || WITH_PARTS
// The output of a query.
inline unsigned short* output_of(const Params& p, const Span& s, int batch, int head, int q) {
    return (unsigned short*)p.o + (WITH_PACKED_Q ? 0 : batch * p.o_batch) + head * p.o_head + long(s.begin_q + q) * p.o_row;
}

// Two columns of an output, as far as it has them.
inline void store_pair(const Params& p, unsigned short* to, int column, uint both) {
    if (column + 1 < p.dim_v) *(uint*)(to + column) = both;
    else if (column < p.dim_v) to[column] = (unsigned short)both;
}
#endif
