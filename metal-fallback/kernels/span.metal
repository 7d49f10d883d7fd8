// Position of the rows of a batch entry in memory.

// `begin` times an operand's first stride is the offset of the entry's first row; `rows` is the number of rows. For a packed sequence they are its first token and its number of tokens.
struct Span {
    long begin;
    int rows;
};

// Index of a row's statistics.
template <typename P>
inline long stats_place(constant P& params, Span span_q, int head, int query) {
    return span_q.begin * params.stats_strides[0] + head * params.stats_strides[1] + query * params.stats_strides[2];
}

#if WITH_PACKED
// The span of a packed sequence. The offsets in `boundaries` are unchecked device data: they are clamped to the tokens of the call, and the length to `longest`.
inline Span span_of(const device Boundary* boundaries, int document, long tokens, int longest) {
    const long first = boundaries[document];
    const long last = boundaries[document + 1];
    const long begin = clamp(first, 0L, tokens);
    const long end = clamp(last, begin, tokens);
    return Span{begin, int(min(end - begin, long(longest)))};
}

#define QUERY_SPAN span_of(cu_seqlens_q, batch, params.tokens_q, params.seq_q)
#define KEY_SPAN span_of(cu_seqlens_kv, batch, params.tokens_kv, params.seq_kv)
#define QUERY_SPAN_ARGUMENT const device Boundary* cu_seqlens_q [[buffer(6)]],
#define KEY_SPAN_ARGUMENT const device Boundary* cu_seqlens_kv [[buffer(7)]],
#else
#define QUERY_SPAN Span{batch, params.seq_q}
#define KEY_SPAN Span{batch, params.seq_kv}
#define QUERY_SPAN_ARGUMENT
#define KEY_SPAN_ARGUMENT
#endif
