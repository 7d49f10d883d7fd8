// Which blocks of keys a tile of queries walks over, and which of them need the mask.

// Bounds of `k - q` that are none.
constexpr int FAR = 1 << 30;

// What band and lengths say of the keys of one tile.
struct Span {
    int lower;    // kept: k - q > lower
    int upper;    // kept: k - q <= upper
    int len_q;    // kept: q < len_q
    int len_kv;   // kept: k < len_kv
    int first_q;  // the tile's first query
};

inline Span span_of(const Params& p, int batch, int tile) {
    Span s = {p.lower, p.upper, p.seq_q, p.seq_kv, tile * TILE_M};
#if WITH_SEQ_LEN_Q
    s.len_q = max(0, min(p.seq_q, p.seq_len_q[batch]));
#endif
#if WITH_SEQ_LEN_KV
    s.len_kv = max(0, min(p.seq_kv, p.seq_len_kv[batch]));
#endif
#if WITH_ENDS
    const int shift = s.len_kv - s.len_q;
    s.lower = max(s.lower, p.ends_lower == -FAR ? -FAR : p.ends_lower + shift);
    s.upper = min(s.upper, p.ends_upper == FAR ? FAR : p.ends_upper + shift);
#endif
    return s;
}

// Keys that band, prefix and lengths keep of a query: those from the first on.
struct Range {
    int first;
    uint count;
};

inline Range kept_of(const Params& p, const Span& s, int q) {
    int past = min(s.len_kv, s.upper < FAR ? q + s.upper + 1 : FAR);
#if WITH_PREFIX
    past = min(past, max(p.prefix, q + 1));
#endif
    const int first = s.lower > -FAR ? max(0, q + s.lower + 1) : 0;
    return Range{first, q < s.len_q ? uint(max(0, past - first)) : 0u};
}

// Blocks of keys of a tile: those that hold anything, low <= block < high, and of these those whose every pair is kept, as far as band, prefix and
// lengths go.
struct Reach {
    int low, high;
    int whole_from, whole_past;
};

inline Reach reach_of(const Params& p, const Span& s) {
    // The ends of what is kept grow with the query.
    const int last_q = min(s.first_q + TILE_M, s.len_q) - 1;
    const Range first = kept_of(p, s, s.first_q), last = kept_of(p, s, last_q);
    const int past = last.first + int(last.count);
    Reach r;
    r.low = first.first / TILE_N;
    r.high = last_q < s.first_q || past <= first.first ? r.low : (past + TILE_N - 1) / TILE_N;
    r.whole_from = (last.first + TILE_N - 1) / TILE_N;
    r.whole_past = s.first_q + TILE_M > s.len_q ? 0 : (first.first + int(first.count)) / TILE_N;
    return r;
}

// The blocks, the last first.
struct Walk {
    int at;
    int end;
};

#if WITH_MAP
// A map has the blocks of each tile that its rules leave, and in the highest bit whether they may drop a part of one.
constexpr uint PARTLY = 1u << 31;
#endif

inline Walk walk_of(const Params& p, const Reach& r, int batch, int head, int tile) {
#if WITH_MAP
    const int row = (batch * p.map_batch + head * p.map_head) * p.tiles + tile;
    return Walk{int(p.map_begin[row]), int(p.map_begin[row + 1])};
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
    partly = KEEP_ANYWHERE || block < r.whole_from || block >= r.whole_past;
    return true;
#endif
}
