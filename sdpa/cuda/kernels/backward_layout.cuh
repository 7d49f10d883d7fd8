// Tile shape, shared-memory layout and named barriers of both sm_90 backward kernels, backward.cu and backward_2cta.cu.

constexpr int WARPS = 8;
constexpr int PANEL = 64;
constexpr int QK_PANELS = DIM_QK / PANEL;
constexpr int V_PANELS = DIM_V / PANEL;
constexpr int ROW_BYTES = 128;
constexpr uint Q_PANEL_BYTES = TILE_M * ROW_BYTES;
// Keys per CTA: a 2-CTA cluster splits a KV block.
constexpr int KEYS = TWO_CTA ? TILE_N / 2 : TILE_N;
constexpr uint KV_PANEL_BYTES = KEYS * ROW_BYTES;
constexpr uint Q_BYTES = Q_PANEL_BYTES * QK_PANELS;
constexpr uint D_O_BYTES = Q_PANEL_BYTES * V_PANELS;
constexpr uint K_BYTES = KV_PANEL_BYTES * QK_PANELS;
constexpr uint V_BYTES = KV_PANEL_BYTES * V_PANELS;
// With TWO_CTA: buffer for the columns of the peer's K that this CTA's half of dQ needs.
constexpr uint K_OTHER_BYTES = TWO_CTA ? KV_PANEL_BYTES * QK_PANELS / 2 : 0;
constexpr uint ROWS_BYTES = TILE_M * 4;
constexpr uint D_S_BYTES = TILE_N * TILE_M * 2;
// A CTA computes 1 / COLUMN_PARTS of the columns of dK and dV; with TWO_CTA it computes all columns of the tensor. dQ of a query tile consists of SLICES
// slices, one per consumer and column part.
constexpr int DK_PANELS = TWO_CTA ? QK_TENSOR_PANELS : QK_PANELS / COLUMN_PARTS;
constexpr int DV_PANELS = TWO_CTA ? V_TENSOR_PANELS : V_PANELS / COLUMN_PARTS;
constexpr int SLICES = 2 * COLUMN_PARTS;
// A query tile is processed 64 rows at a time.
constexpr int Q_SUBTILES = TILE_M / 64;
constexpr int SCORES = 32;
constexpr int QUERY_PAIRS = SCORES / 4;
constexpr int RAW_SCORES = WITH_PARAMETER_GRADIENTS ? SCORES : 1;
// S is transposed: its rows are keys, and its columns are queries.
#define BY_KEYS 1
constexpr int DK = DK_PANELS * PANEL / 2;
constexpr int DV = DV_PANELS * PANEL / 2;
constexpr int DQ = PANEL / 2;
// With fixed-point sums and 128 queries in a step: buffers for the scales of four steps. A step's scales are needed in the next one, when its Q may be gone.
// With 64 queries it is faster to load them from global memory.
#define STAGED_SCALES (FIXED_POINT_DQ && TILE_M == 128)
constexpr int SCALE_STAGES = STAGED_SCALES ? 4 : 0;
// The destination of a thread's elements of dQ in a step. It is an address in the accumulator. With fixed-point sums it is the index of the thread's first query
// among the rows of all query tiles, of which there are fewer than 2^31.
#if FIXED_POINT_DQ
typedef int DqPlace;
#else
typedef float* DqPlace;
#endif
// dQ of one consumer in one step: 64 x 64 f32. With DQ_BY_TMA it is reduced through shared memory.
constexpr int DQ_SLICE = 64 * 64;
constexpr uint DQ_SLICE_BYTES = DQ_BY_TMA ? DQ_SLICE * 4 : 0;
// A warp's piece of a slice. A converting warp has buffers for two f32 pieces and for two converted pieces of half the size: three f32 pieces in all.
constexpr int DQ_PIECE = DQ_SLICE / 4;
constexpr uint DQ_PIECE_BYTES = DQ_BY_TMA ? DQ_PIECE * 4 : 0, DQ_CONVERT_BYTES = 3 * DQ_PIECE_BYTES;
// L2 policy of K and V: they are read once, unless several CTAs share a KV block.
constexpr bool KV_EVICT_FIRST = !WITH_HEAD_SPLITS && COLUMN_PARTS == 1;
// With TWO_CTA: buffer for P in f32, which consumer 0 passes to consumer 1.
constexpr uint P_BYTES = TWO_CTA ? 64 * 64 * 4 : 0;
// With several stages of Q, a step issues the next step's S at its end, since the next Q can already be loaded.
constexpr bool PREFETCH_S = STAGES > 1;
// Log-sum-exps are loaded before waiting for S, if nothing else needs the registers: no second subtile, no dropout, no long trace.
constexpr bool LSE_FIRST = Q_SUBTILES == 1 && !LOW_REGISTERS;
// With packed sequences the next step is determined at the end of a step: determining it earlier costs registers that the sequence offsets need.
constexpr bool NEXT_STEP_LAST = WITH_PACKED_Q;
// Named barriers. CONSUMERS: both consumers. DQ_EMPTY and DQ_FULL: a consumer and the dQ reduce warp, two barriers each. WARPGROUPS: four barriers, on
// which the 2-CTA consumers synchronise twice per KV block.
constexpr uint BARRIER_CONSUMERS = 1, BARRIER_DQ_EMPTY = 2, BARRIER_DQ_FULL = 4, BARRIER_WARPGROUPS = 6;
// Number of warps that read tile indices: the consumers, and with TMA reductions also the dQ reduce warp and two converting warps.
constexpr uint TILE_CONSUMER_WARPS = WARPS + (DQ_BY_TMA ? 3 : 0);
// With TWO_CTA: the number of readers of a tile index, which are each CTA's consumer warps and dO producer, and CTA 1's Q producer.
constexpr uint TILE_CONSUMERS_2CTA = 2 * (WARPS + 1) + 1;
constexpr float LOG2_E = 1.44269504088896340736f;
constexpr float LN_2 = 0.69314718055994530942f;
#define INFINITE __int_as_float(0x7f800000)

// A work item: a KV block of one KV head, column part `part` (the CTA's rank with TWO_CTA) and one split of the GQA group's heads. `tile_index` counts
// blocks and parts, `section` is the L2 section, `slot` the KV head's slot in the ring of dQ accumulators.
struct Tile {
    int block, batch, head, part, head_split;
    int tile_index, section, slot;
};

// Returns the index of a query tile among the tiles of all heads. With packed sequences, a head's tokens fill `tokens / TILE_M` tiles, plus one partial
// tile per sequence.
inline long q_tile_index(const Params& p, const SeqInfo& s, int batch, int head, int tile) {
#if WITH_PACKED_Q
    return long(head) * p.head_tiles + s.begin_q / TILE_M + batch + tile;
#else
    return (long(batch) * p.heads_q + head) * p.head_tiles + tile;
#endif
}

// Shared memory in this order: operands, dS of two steps, P of the 2-CTA consumers, dQ slices, pieces to convert, zeros, row statistics, scales of dQ,
// mbarriers, tile indices.
struct SharedStorage {
    uint k, v, k_other, q, d_o, d_s, p, dq_slices, dq_pieces, zeros, lse, delta, dq_scales;
    uint kv_full, kv_empty, q_full, q_empty, d_o_full, d_o_empty, tile_full, tile_empty, dq_pieces_full, d_s_full, d_s_empty, tile_slots, last;
    // With TWO_CTA: one mbarrier for each pair of warps, one of consumer 0 and one of consumer 1, that have the same keys.
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
    smem.dq_scales = smem.delta + STAGES * ROWS_BYTES;
    smem.kv_full = smem.dq_scales + SCALE_STAGES * ROWS_BYTES;
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
