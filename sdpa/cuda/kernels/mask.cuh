// Masks known without evaluating a trace: diagonal band, prefix, per-sequence lengths, varlen offsets. Every kernel gets its bounds of keys or queries
// from here.

// Absolute value of an absent band bound.
constexpr int UNBOUNDED = 1 << 30;

// Band and lengths of one sequence.
struct SeqInfo {
    int lower;     // attended: k - q > lower
    int upper;     // attended: k - q <= upper
    int len_q;     // attended: q < len_q
    int len_kv;    // attended: k < len_kv
    int begin_q;   // packed: token of the first query
    int begin_kv;  // packed: token of the first key
};

#if WITH_PACKED_Q || WITH_PACKED_KV
// The first token and the number of tokens of a packed sequence.
struct Sequence {
    int begin, length;
};

// cu_seqlens is unchecked device data: offsets are clamped to the call's tokens, lengths to the longest sequence of the plan.
inline Sequence sequence_of(const void* boundaries, int document, int tokens, int longest) {
    const CuSeqlen* const at = (const CuSeqlen*)boundaries + document;
    const CuSeqlen begin = max(CuSeqlen(0), min(at[0], CuSeqlen(tokens)));
    const CuSeqlen end = max(begin, min(at[1], CuSeqlen(tokens)));
    return Sequence{int(begin), int(min(end - begin, CuSeqlen(longest)))};
}
#endif

// Intersects the band with a second one (`ends_lower`, `ends_upper`) that is bottom-right aligned for this sequence's lengths.
inline SeqInfo align_to_ends(const Params& p, SeqInfo s) {
#if WITH_ENDS
    const int shift = s.len_kv - s.len_q;
    s.lower = max(s.lower, p.ends_lower == -UNBOUNDED ? -UNBOUNDED : p.ends_lower + shift);
    s.upper = min(s.upper, p.ends_upper == UNBOUNDED ? UNBOUNDED : p.ends_upper + shift);
#endif
    return s;
}

inline SeqInfo seq_info_of(const Params& p, int batch) {
    SeqInfo s = {p.lower, p.upper, p.seq_q, p.seq_kv};
#if WITH_PACKED_Q
    const Sequence queries = sequence_of(p.boundaries_q, batch, p.tokens_q, p.seq_q);
    s.begin_q = queries.begin;
    s.len_q = queries.length;
#endif
#if WITH_PACKED_KV
    const Sequence keys = sequence_of(p.boundaries_kv, batch, p.tokens_kv, p.seq_kv);
    s.begin_kv = keys.begin;
    s.len_kv = keys.length;
#endif
#if WITH_SEQ_LEN_Q
    s.len_q = max(0, min(s.len_q, p.seq_len_q[batch]));
#endif
#if WITH_SEQ_LEN_KV
    s.len_kv = max(0, min(s.len_kv, p.seq_len_kv[batch]));
#endif
    return align_to_ends(p, s);
}

// Returns the number of rows of the output or gradient to write: all rows of the tensor, or only the tokens of a packed sequence.
inline int rows_q(const Params& p, const SeqInfo& s) { return WITH_PACKED_Q ? s.len_q : p.seq_q; }
inline int rows_kv(const Params& p, const SeqInfo& s) { return WITH_PACKED_KV ? s.len_kv : p.seq_kv; }

// Returns the index of a query in stats, row_max and sum_exp.
inline long stats_index(const Params& p, const SeqInfo& s, int batch, int head, int q) {
    return WITH_PACKED_Q ? long(s.begin_q + q) * p.heads_q + head : (long(batch) * p.heads_q + head) * p.seq_q + q;
}

// Half-open range of indices; empty if `end` <= `begin`.
struct Range {
    int begin, end;
    inline bool contains(int index) const { return uint(index - begin) < uint(max(0, end - begin)); }
};

// Returns the keys that a query attends to by band, prefix and lengths.
inline Range attended_keys(const Params& p, const SeqInfo& s, int q) {
    int end = min(s.len_kv, s.upper < UNBOUNDED ? q + s.upper + 1 : UNBOUNDED);
#if WITH_PREFIX
    end = min(end, max(p.prefix, q + 1));
#endif
    const int begin = s.lower > -UNBOUNDED ? max(0, q + s.lower + 1) : 0;
    return Range{begin, q < s.len_q ? end : begin};
}

// Returns the queries that attend to a key by band, prefix and lengths. Neither end of the range decreases as the key increases.
inline Range attending_queries(const Params& p, const SeqInfo& s, int k) {
    int begin = s.upper < UNBOUNDED ? max(0, k - s.upper) : 0;
#if WITH_PREFIX
    if (k >= p.prefix) begin = max(begin, k);
#endif
    const int end = s.lower > -UNBOUNDED ? min(s.len_q, k - s.lower) : s.len_q;
    return Range{begin, k < s.len_kv ? end : begin};
}

// Returns the position at an offset from (q, k), for traces. CLAMPS_QUERIES and CLAMPS_KEYS are set if a trace reads tensors along that axis or is long;
// the index is then clamped to the extent. Otherwise values past the extent are computed and discarded.
template <bool key_inside = false>
inline Place place_at(const Params& p, int batch, int head, int q, int k, int q_offset, int k_offset) {
    const bool clamps = CLAMPS_KEYS && !key_inside;
    return Place{batch, head, CLAMPS_QUERIES ? min(q + q_offset, p.seq_q - 1) : q + q_offset, clamps ? min(k + k_offset, p.seq_kv - 1) : k + k_offset,
                 CLAMPS_QUERIES ? 0 : q_offset, clamps ? 0 : k_offset};
}

#if WITH_BLOCK_LISTS
// Flag in an entry of a block list: the block is partial, because the mask excludes some of its (query, key) pairs.
constexpr uint PARTIAL_BLOCK = 1u << 31;
#endif
