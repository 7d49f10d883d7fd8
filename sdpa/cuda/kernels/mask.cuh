// What band, prefix and lengths keep.

// Bounds of `k - q` that are none.
constexpr int FAR = 1 << 30;

// What band and lengths say of a batch entry.
struct Span {
    int lower;   // kept: k - q > lower
    int upper;   // kept: k - q <= upper
    int len_q;   // kept: q < len_q
    int len_kv;  // kept: k < len_kv
    int begin_q;   // of a document: the token that its first query is
    int begin_kv;  // the same of its first key
};

#if WITH_PACKED_Q || WITH_PACKED_KV
// Tokens of a document.
struct Document {
    int begin, length;
};

// Boundaries are data that nobody has checked: whatever they hold, a document lies within the tokens of the call and is no longer than the longest.
inline Document document_of(const void* boundaries, int document, int tokens, int longest) {
    const Boundary* const at = (const Boundary*)boundaries + document;
    const Boundary begin = max(Boundary(0), min(at[0], Boundary(tokens)));
    const Boundary end = max(begin, min(at[1], Boundary(tokens)));
    return Document{int(begin), int(min(end - begin, Boundary(longest)))};
}
#endif

// With what bands about the ends come to for these lengths.
inline Span about_the_ends(const Params& p, Span s) {
#if WITH_ENDS
    const int shift = s.len_kv - s.len_q;
    s.lower = max(s.lower, p.ends_lower == -FAR ? -FAR : p.ends_lower + shift);
    s.upper = min(s.upper, p.ends_upper == FAR ? FAR : p.ends_upper + shift);
#endif
    return s;
}

inline Span span_of(const Params& p, int batch) {
    Span s = {p.lower, p.upper, p.seq_q, p.seq_kv};
#if WITH_PACKED_Q
    const Document queries = document_of(p.boundaries_q, batch, p.tokens_q, p.seq_q);
    s.begin_q = queries.begin;
    s.len_q = queries.length;
#endif
#if WITH_PACKED_KV
    const Document keys = document_of(p.boundaries_kv, batch, p.tokens_kv, p.seq_kv);
    s.begin_kv = keys.begin;
    s.len_kv = keys.length;
#endif
#if WITH_SEQ_LEN_Q
    s.len_q = max(0, min(s.len_q, p.seq_len_q[batch]));
#endif
#if WITH_SEQ_LEN_KV
    s.len_kv = max(0, min(s.len_kv, p.seq_len_kv[batch]));
#endif
    return about_the_ends(p, s);
}

// Rows that an entry has of its own: of a document its tokens.
inline int rows_q(const Params& p, const Span& s) { return WITH_PACKED_Q ? s.len_q : p.seq_q; }
inline int rows_kv(const Params& p, const Span& s) { return WITH_PACKED_KV ? s.len_kv : p.seq_kv; }

// Where the statistics of a query are.
inline long stats_place(const Params& p, const Span& s, int batch, int head, int q) {
    return WITH_PACKED_Q ? long(s.begin_q + q) * p.heads_q + head : (long(batch) * p.heads_q + head) * p.seq_q + q;
}

// Indices first <= index < past; none where `past` is not behind `first`.
struct Range {
    int first, past;
    inline bool holds(int index) const { return uint(index - first) < uint(max(0, past - first)); }
};

// Keys that band, prefix and lengths keep of a query.
inline Range kept_of(const Params& p, const Span& s, int q) {
    int past = min(s.len_kv, s.upper < FAR ? q + s.upper + 1 : FAR);
#if WITH_PREFIX
    past = min(past, max(p.prefix, q + 1));
#endif
    const int first = s.lower > -FAR ? max(0, q + s.lower + 1) : 0;
    return Range{first, q < s.len_q ? past : first};
}

// Queries that they keep of a key. Both ends grow with the key.
inline Range kept_by(const Params& p, const Span& s, int k) {
    int first = s.upper < FAR ? max(0, k - s.upper) : 0;
#if WITH_PREFIX
    if (k >= p.prefix) first = max(first, k);
#endif
    const int past = s.lower > -FAR ? min(s.len_q, k - s.lower) : s.len_q;
    return Range{first, k < s.len_kv ? past : first};
}

// The place so far behind a query and a key that scores of a thread have in common, as traces are asked for it. Tensors along queries or keys have elements at places of
// the problem alone. Where traces read none, what they make of places behind it is dropped, and nobody asks where it ends.
template <bool key_inside = false>
inline Place place_behind(const Params& p, int batch, int head, int q, int k, int q_on, int k_on) {
    const bool clamps = CLAMPS_KEYS && !key_inside;
    return Place{batch, head, CLAMPS_QUERIES ? min(q + q_on, p.seq_q - 1) : q + q_on, clamps ? min(k + k_on, p.seq_kv - 1) : k + k_on,
                 CLAMPS_QUERIES ? 0 : q_on, clamps ? 0 : k_on};
}

#if WITH_MAP
// A map has the blocks of each tile that its rules leave, and in the highest bit whether they may drop a part of one.
constexpr uint PARTLY = 1u << 31;
#endif
