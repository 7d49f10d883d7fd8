// Which blocks of keys a tile of queries walks over, and which of them need the mask.

// A list is a tile's, and has blocks of keys.
#define OUTERS(p) ((p).tiles)
#define INNERS(p) (((p).seq_kv + TILE_N - 1) / TILE_N)
#define LAST_FIRST true

// Blocks of keys of a tile: those that hold anything, low <= block < high, and of these those whose every pair is kept, as far as band, prefix and
// lengths go.
struct Reach {
    int low, high;
    int whole_from, whole_past;
};

inline Reach reach_of(const Params& p, const Span& s, int tile) {
    // The ends of what is kept grow with the query.
    const int first_q = tile * TILE_M, last_q = min(first_q + TILE_M, s.len_q) - 1;
    const Range first = kept_of(p, s, first_q), last = kept_of(p, s, last_q);
    Reach r;
    r.low = first.first / TILE_N;
    r.high = last_q < first_q || last.past <= first.first ? r.low : (last.past + TILE_N - 1) / TILE_N;
    r.whole_from = (last.first + TILE_N - 1) / TILE_N;
    // Of queries behind the last one nothing is kept: what their rows come to is dropped.
    r.whole_past = first.past / TILE_N;
    return r;
}

// The blocks, the last first.
struct Walk {
    int at;
    int end;
};

inline Walk walk_of(const Params& p, const Reach& r, int batch, int head, int tile) {
#if WITH_MAP
    const int row = (batch * p.map_batch + head * p.map_head) * p.tiles + tile;
    return Walk{int(p.map_begin[row]), int(p.map_end[row])};
#else
    return Walk{r.high, r.low};
#endif
}

// The next block, and whether the mask is needed; false where there is none.
inline bool walk_on(Walk& walk, const Params& p, const Reach& r, int& block, bool& partly) {
#if WITH_MAP
    while (walk.at < walk.end) {
        const uint item = p.map_blocks[walk.at++];
        block = int(item & ~PARTLY);
        if (block >= r.low && block < r.high) {
            partly = (item & PARTLY) != 0 || block < r.whole_from || block >= r.whole_past;
            return true;
        }
    }
    return false;
#else
    if (walk.at <= walk.end) return false;
    block = --walk.at;
    partly = block < r.whole_from || block >= r.whole_past;
    return true;
#endif
}
