// Which tiles of queries a block of keys walks over, and which of them need the mask.

// A list is a block's, and has tiles of queries.
#define OUTERS(p) ((p).blocks)
#define INNERS(p) ((p).tiles)
#define LAST_FIRST false

// Tiles that hold anything, low <= tile < high, and of these those whose every pair is kept, as far as band, prefix and lengths go.
struct Reach {
    int low, high;
    int whole_from, whole_past;
};

inline Reach reach_of(const Params& p, const Span& s, int block) {
    const int first_k = block * TILE_N, last_k = min(first_k + TILE_N, s.len_kv) - 1;
    const Range first = kept_by(p, s, first_k), last = kept_by(p, s, last_k);
    Reach r;
    r.low = first.first / TILE_M;
    r.high = last_k < first_k || last.past <= first.first ? r.low : (last.past + TILE_M - 1) / TILE_M;
    r.whole_from = (last.first + TILE_M - 1) / TILE_M;
    r.whole_past = first_k + TILE_N > s.len_kv ? 0 : first.past / TILE_M;
    return r;
}

// The tiles, the first first.
struct Walk {
    int at;
    int end;
};

inline Walk walk_of(const Params& p, const Reach& r, int batch, int head, int block) {
#if WITH_MAP
    const int row = (batch * p.map_batch + head * p.map_head) * p.blocks + block;
    return Walk{int(p.map_begin[row]), int(p.map_end[row])};
#else
    return Walk{r.low, r.high};
#endif
}

// The next tile, and whether the mask is needed; false where there is none.
inline bool walk_on(Walk& walk, const Params& p, const Reach& r, int& tile, bool& partly) {
#if WITH_MAP
    while (walk.at < walk.end) {
        const uint item = p.map_blocks[walk.at++];
        tile = int(item & ~PARTLY);
        if (tile >= r.low && tile < r.high) {
            partly = (item & PARTLY) != 0 || tile < r.whole_from || tile >= r.whole_past;
            return true;
        }
    }
    return false;
#else
    if (walk.at >= walk.end) return false;
    tile = walk.at++;
    partly = tile < r.whole_from || tile >= r.whole_past;
    return true;
#endif
}
