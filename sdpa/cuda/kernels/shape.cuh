// How the backward kernel is cut, and where scores stand in it.

constexpr int WARPS = 8;
constexpr int PANEL = 64;
constexpr int QK_PANELS = DIM_QK / PANEL;
constexpr int V_PANELS = DIM_V / PANEL;
constexpr int ROW_BYTES = 128;
constexpr uint Q_PANEL_BYTES = TILE_M * ROW_BYTES;
constexpr uint KV_PANEL_BYTES = TILE_N * ROW_BYTES;
constexpr uint Q_BYTES = Q_PANEL_BYTES * QK_PANELS;
constexpr uint D_O_BYTES = Q_PANEL_BYTES * V_PANELS;
constexpr uint K_BYTES = KV_PANEL_BYTES * QK_PANELS;
constexpr uint V_BYTES = KV_PANEL_BYTES * V_PANELS;
constexpr uint ROWS_BYTES = TILE_M * 4;
constexpr uint D_S_BYTES = TILE_N * TILE_M * 2;
// Of gradients of keys and values, a block of threads has a part of the columns; of those of queries too, a group a half of that.
constexpr int DK_PANELS = QK_PANELS / PARTS;
constexpr int DV_PANELS = V_PANELS / PARTS;
constexpr int SLICES = 2 * PARTS;
// Queries of a tile go by 64 at a time.
constexpr int SUBS = TILE_M / 64;
constexpr int SCORES = 32;
constexpr int PAIRS = SCORES / 4;
constexpr int RAW = WITH_ALONG ? SCORES : 1;
constexpr int DK = DK_PANELS * PANEL / 2;
constexpr int DV = DV_PANELS * PANEL / 2;
constexpr int DQ = PANEL / 2;
// What a group has of the gradients of a step's queries: 64 by 64 numbers, which leave by way of shared memory where there is room.
constexpr int SLICE = 64 * 64;
constexpr uint SUMS_BYTES = SUMS_BY_COPY ? SLICE * 4 : 0;
// A step's scores are asked for at the end of the step before, where its queries are there by then.
constexpr bool AHEAD = STAGES > 1;
// Numbers of barriers: of the groups that compute; of each group and the warp that takes its sums.
constexpr uint BOTH_GROUPS = 1, SUMS_FREE = 2, SUMS_THERE = 4;
constexpr float LOG2_E = 1.44269504088896340736f;
#define INFINITE __int_as_float(0x7f800000)

// A block of keys of one key head, and a part of the columns.
struct Tile {
    int block, batch, head, part;
};

// Which of all tiles of queries one is, of all heads. Of packed documents a head has those that begin before them, and one more for each document: as many as tokens fill,
// and one each that is not full.
inline long tile_place(const Params& p, const Span& s, int batch, int head, int tile) {
#if WITH_PACKED_Q
    return long(head) * p.head_tiles + s.begin_q / TILE_M + batch + tile;
#else
    return (long(batch) * p.heads_q + head) * p.head_tiles + tile;
#endif
}

// Where a thread's scores stand: its first key, of two that are 8 apart, and its first query.
struct Corner {
    int batch, head, q, k;
};

inline Place place_of(const Params& p, const Corner& corner, int n) {
    // What traces read is there for places of the problem alone.
    return Place{corner.batch, corner.head, min(corner.q + 8 * (n / 4) + (n & 1), p.seq_q - 1), min(corner.k + (n & 2 ? 8 : 0), p.seq_kv - 1)};
}
