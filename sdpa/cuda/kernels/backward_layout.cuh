// How the backward kernel is cut, and where scores stand in it.

constexpr int WARPS = 8;
constexpr int PANEL = 64;
constexpr int QK_PANELS = DIM_QK / PANEL;
constexpr int V_PANELS = DIM_V / PANEL;
constexpr int ROW_BYTES = 128;
constexpr uint Q_PANEL_BYTES = TILE_M * ROW_BYTES;
// Keys of a block of threads: of a pair, each has a half of a block of keys.
constexpr int KEYS = PAIR ? TILE_N / 2 : TILE_N;
constexpr uint KV_PANEL_BYTES = KEYS * ROW_BYTES;
constexpr uint Q_BYTES = Q_PANEL_BYTES * QK_PANELS;
constexpr uint D_O_BYTES = Q_PANEL_BYTES * V_PANELS;
constexpr uint K_BYTES = KV_PANEL_BYTES * QK_PANELS;
constexpr uint V_BYTES = KV_PANEL_BYTES * V_PANELS;
// Of a pair, the other's keys along the columns of gradients of queries that a block of threads has.
constexpr uint K_OTHER_BYTES = PAIR ? KV_PANEL_BYTES * QK_PANELS / 2 : 0;
constexpr uint ROWS_BYTES = TILE_M * 4;
constexpr uint D_S_BYTES = TILE_N * TILE_M * 2;
// Of gradients of keys and values, a block of threads has a part of the columns, but one of a pair all that there are; of those of queries, a group a half of its part.
constexpr int DK_PANELS = PAIR ? QK_THERE : QK_PANELS / PARTS;
constexpr int DV_PANELS = PAIR ? V_THERE : V_PANELS / PARTS;
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
// What a warp has of it; and what a warp that rounds has at once: two pieces, and two of rounded rows.
constexpr int PIECE = SLICE / 4;
constexpr uint PIECE_BYTES = SUMS_BY_COPY ? PIECE * 4 : 0, SETTLED_BYTES = 3 * PIECE_BYTES;
// Keys and values are read once, but where blocks of threads share them.
constexpr bool ONCE = !WITH_SHARES && PARTS == 1;
// Weights, f32, on their way from the group of a pair that makes them to the other.
constexpr uint WEIGHTS_BYTES = PAIR ? 64 * 64 * 4 : 0;
// A step's scores are asked for at the end of the step before, where its queries are there by then.
constexpr bool AHEAD = STAGES > 1;
// Numbers of rows are asked for before scores, where nothing else needs their registers: no products of the half before, no random numbers, no long traces.
constexpr bool ROWS_FIRST = SUBS == 1 && !TIGHT;
// Of documents the next step is found behind a step, not beside it: their boundaries take registers too.
constexpr bool NEXT_LAST = WITH_PACKED_Q;
// Numbers of barriers: of the groups that compute; of each group and the warp that takes its sums; of each group of a pair and the other, twice.
constexpr uint BOTH_GROUPS = 1, SUMS_FREE = 2, SUMS_THERE = 4, OTHER_GROUP = 6;
// Warps that are told which block of keys is next: those that compute; where the copy engine adds sums, who asks it, and two that round what is summed up.
constexpr uint TOLD_WARPS = WARPS + (SUMS_BY_COPY ? 3 : 0);
// In a pair, of both blocks, those that compute and the one that brings gradients of outputs; and who brings queries in the block that takes none.
constexpr uint TOLD_IN_PAIR = 2 * (WARPS + 1) + 1;
constexpr float LOG2_E = 1.44269504088896340736f;
constexpr float LN_2 = 0.69314718055994530942f;
#define INFINITE __int_as_float(0x7f800000)

// A block of keys of one key head, a part of the columns, and of the heads that share the keys; which of all blocks it is, and which of its section's key heads
// in the ring of sums.
struct Tile {
    int block, batch, head, part, share;
    int number, section, slot;
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
    return place_behind(p, corner.batch, corner.head, corner.q, corner.k, 8 * (n / 4) + (n & 1), n & 2 ? 8 : 0);
}

// Where things lie in shared memory: operands, gradients of scores of two steps, weights of a pair's groups, sums that leave and pieces that settle, zeros, numbers of rows,
// barriers, numbers that are told.
struct Shared {
    uint k, v, k_other, q, d_o, d_s, weights, sums, settled, zeros, lse, delta;
    uint kv_full, kv_free, q_full, q_free, d_o_full, d_o_free, told_full, told_free, settled_full, d_s_full, d_s_free, told, last;
    // Of a pair, for each warp of a group and the one of the other that has its keys.
    uint weights_full, weights_free;
};

inline Shared layout(uint base) {
    Shared at;
    at.k = base;
    at.v = at.k + K_BYTES;
    at.k_other = at.v + V_BYTES;
    at.q = at.k_other + K_OTHER_BYTES;
    at.d_o = at.q + STAGES * Q_BYTES;
    at.d_s = at.d_o + D_O_STAGES * D_O_BYTES;
    at.weights = at.d_s + 2 * D_S_BYTES;
    at.sums = at.weights + WEIGHTS_BYTES;
    at.settled = at.sums + 2 * SUMS_BYTES;
    at.zeros = at.settled + 2 * SETTLED_BYTES;
    at.lse = at.zeros + PIECE_BYTES;
    at.delta = at.lse + STAGES * ROWS_BYTES;
    at.kv_full = at.delta + STAGES * ROWS_BYTES;
    at.kv_free = at.kv_full + 8;
    at.q_full = at.kv_free + 8;
    at.q_free = at.q_full + 8 * STAGES;
    at.d_o_full = at.q_free + 8 * STAGES;
    at.d_o_free = at.d_o_full + 8 * STAGES;
    at.told_full = at.d_o_free + 8 * STAGES;
    at.told_free = at.told_full + 16;
    at.settled_full = at.told_free + 16;
    at.d_s_full = at.settled_full + 32;
    at.d_s_free = at.d_s_full + 16;
    at.told = at.d_s_free + 16;
    at.last = at.told + 8;
    at.weights_full = at.last + 8;
    at.weights_free = at.weights_full + 32;
    return at;
}
