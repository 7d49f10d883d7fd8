// How the backward kernel is cut, and where scores stand in it.

constexpr int WARPS = 8;
constexpr int PANEL = 64;
constexpr int QK_PANELS = DIM_QK / PANEL;
constexpr int V_PANELS = DIM_V / PANEL;
constexpr int ROW_BYTES = 128;
constexpr uint Q_PANEL_BYTES = TILE_M * ROW_BYTES;
// Keys of a block of threads: of a pair, each has a half of a block of keys.
constexpr int KEYS = TWO_CTA ? TILE_N / 2 : TILE_N;
constexpr uint KV_PANEL_BYTES = KEYS * ROW_BYTES;
constexpr uint Q_BYTES = Q_PANEL_BYTES * QK_PANELS;
constexpr uint D_O_BYTES = Q_PANEL_BYTES * V_PANELS;
constexpr uint K_BYTES = KV_PANEL_BYTES * QK_PANELS;
constexpr uint V_BYTES = KV_PANEL_BYTES * V_PANELS;
// Of a pair, the other's keys along the columns of gradients of queries that a block of threads has.
constexpr uint K_OTHER_BYTES = TWO_CTA ? KV_PANEL_BYTES * QK_PANELS / 2 : 0;
constexpr uint ROWS_BYTES = TILE_M * 4;
constexpr uint D_S_BYTES = TILE_N * TILE_M * 2;
// Of gradients of keys and values, a block of threads has a part of the columns, but one of a pair all that there are; of those of queries, a group a half of its part.
constexpr int DK_PANELS = TWO_CTA ? QK_TENSOR_PANELS : QK_PANELS / COLUMN_PARTS;
constexpr int DV_PANELS = TWO_CTA ? V_TENSOR_PANELS : V_PANELS / COLUMN_PARTS;
constexpr int SLICES = 2 * COLUMN_PARTS;
// Queries of a tile go by 64 at a time.
constexpr int Q_SUBTILES = TILE_M / 64;
constexpr int SCORES = 32;
constexpr int QUERY_PAIRS = SCORES / 4;
constexpr int RAW_SCORES = WITH_PARAMETER_GRADIENTS ? SCORES : 1;
constexpr int DK = DK_PANELS * PANEL / 2;
constexpr int DV = DV_PANELS * PANEL / 2;
constexpr int DQ = PANEL / 2;
// What a group has of the gradients of a step's queries: 64 by 64 numbers, which leave by way of shared memory where there is room.
constexpr int DQ_SLICE = 64 * 64;
constexpr uint DQ_SLICE_BYTES = DQ_BY_TMA ? DQ_SLICE * 4 : 0;
// What a warp has of it; and what a warp that rounds has at once: two pieces, and two of rounded rows.
constexpr int DQ_PIECE = DQ_SLICE / 4;
constexpr uint DQ_PIECE_BYTES = DQ_BY_TMA ? DQ_PIECE * 4 : 0, DQ_CONVERT_BYTES = 3 * DQ_PIECE_BYTES;
// Keys and values are read once, but where blocks of threads share them.
constexpr bool KV_EVICT_FIRST = !WITH_HEAD_SPLITS && COLUMN_PARTS == 1;
// Weights, f32, on their way from the group of a pair that makes them to the other.
constexpr uint P_BYTES = TWO_CTA ? 64 * 64 * 4 : 0;
// A step's scores are asked for at the end of the step before, where its queries are there by then.
constexpr bool PREFETCH_S = STAGES > 1;
// Numbers of rows are asked for before scores, where nothing else needs their registers: no products of the half before, no random numbers, no long traces.
constexpr bool LSE_FIRST = Q_SUBTILES == 1 && !LOW_REGISTERS;
// Of documents the next step is found behind a step, not beside it: their boundaries take registers too.
constexpr bool NEXT_STEP_LAST = WITH_PACKED_Q;
// Numbers of barriers: of the groups that compute; of each group and the warp that takes its sums; of each group of a pair and the other, twice.
constexpr uint BARRIER_CONSUMERS = 1, BARRIER_DQ_EMPTY = 2, BARRIER_DQ_FULL = 4, BARRIER_WARPGROUPS = 6;
// Warps that are told which block of keys is next: those that compute; where the copy engine adds sums, who asks it, and two that round what is summed up.
constexpr uint TILE_CONSUMER_WARPS = WARPS + (DQ_BY_TMA ? 3 : 0);
// In a pair, of both blocks, those that compute and the one that brings gradients of outputs; and who brings queries in the block that takes none.
constexpr uint TILE_CONSUMERS_2CTA = 2 * (WARPS + 1) + 1;
constexpr float LOG2_E = 1.44269504088896340736f;
constexpr float LN_2 = 0.69314718055994530942f;
#define INFINITE __int_as_float(0x7f800000)

// A block of keys of one key head, a part of the columns, and of the heads that share the keys; which of all blocks it is, and which of its section's key heads
// in the ring of sums.
struct Tile {
    int block, batch, head, part, head_split;
    int tile_index, section, slot;
};

// Which of all tiles of queries one is, of all heads. Of packed documents a head has those that begin before them, and one more for each document: as many as tokens fill,
// and one each that is not full.
inline long q_tile_index(const Params& p, const SeqInfo& s, int batch, int head, int tile) {
#if WITH_PACKED_Q
    return long(head) * p.head_tiles + s.begin_q / TILE_M + batch + tile;
#else
    return (long(batch) * p.heads_q + head) * p.head_tiles + tile;
#endif
}

// Where a thread's scores stand: its first key, of two that are 8 apart, and its first query.
struct FragmentOrigin {
    int batch, head, q, k;
};

inline Place place_of_score(const Params& p, const FragmentOrigin& origin, int n) {
    return place_at(p, origin.batch, origin.head, origin.q, origin.k, fragment_column(n), fragment_row(n));
}

// Where things lie in shared memory: operands, gradients of scores of two steps, weights of a pair's groups, sums that leave and pieces that settle, zeros, numbers of rows,
// barriers, numbers that are told.
struct SharedStorage {
    uint k, v, k_other, q, d_o, d_s, p, dq_slices, dq_pieces, zeros, lse, delta;
    uint kv_full, kv_empty, q_full, q_empty, d_o_full, d_o_empty, tile_full, tile_empty, dq_pieces_full, d_s_full, d_s_empty, tile_slots, last;
    // Of a pair, for each warp of a group and the one of the other that has its keys.
    uint p_full, p_empty;
};

inline SharedStorage shared_layout(uint base) {
    SharedStorage smem;
    smem.k = base;
    smem.v = smem.k + K_BYTES;
    smem.k_other = smem.v + V_BYTES;
    smem.q = smem.k_other + K_OTHER_BYTES;
    smem.d_o = smem.q + STAGES * Q_BYTES;
    smem.d_s = smem.d_o + D_O_STAGES * D_O_BYTES;
    smem.p = smem.d_s + 2 * D_S_BYTES;
    smem.dq_slices = smem.p + P_BYTES;
    smem.dq_pieces = smem.dq_slices + 2 * DQ_SLICE_BYTES;
    smem.zeros = smem.dq_pieces + 2 * DQ_CONVERT_BYTES;
    smem.lse = smem.zeros + DQ_PIECE_BYTES;
    smem.delta = smem.lse + STAGES * ROWS_BYTES;
    smem.kv_full = smem.delta + STAGES * ROWS_BYTES;
    smem.kv_empty = smem.kv_full + 8;
    smem.q_full = smem.kv_empty + 8;
    smem.q_empty = smem.q_full + 8 * STAGES;
    smem.d_o_full = smem.q_empty + 8 * STAGES;
    smem.d_o_empty = smem.d_o_full + 8 * STAGES;
    smem.tile_full = smem.d_o_empty + 8 * STAGES;
    smem.tile_empty = smem.tile_full + 16;
    smem.dq_pieces_full = smem.tile_empty + 16;
    smem.d_s_full = smem.dq_pieces_full + 32;
    smem.d_s_empty = smem.d_s_full + 16;
    smem.tile_slots = smem.d_s_empty + 16;
    smem.last = smem.tile_slots + 8;
    smem.p_full = smem.last + 8;
    smem.p_empty = smem.p_full + 32;
    return smem;
}
