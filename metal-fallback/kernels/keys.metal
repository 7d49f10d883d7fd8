// Bounds of the keys that a query attends to.

// Band and prefix, and the numbers of queries and keys that the lengths leave.
struct Bounds {
    int lower;
    int upper;
    int prefix;
    int queries;
    int keys;
};

// Intersects the band with a second one, which is bottom-right aligned: it is relative to the last query and the last key that the lengths leave. Adding `further` makes it relative to the first ones.
inline Bounds about_ends(Bounds bounds, int lower, int upper) {
    const int further = bounds.keys - bounds.queries;
    bounds.lower = max(bounds.lower, lower + further);
    bounds.upper = min(bounds.upper, upper + further);
    return bounds;
}

inline bool in_bounds(Bounds bounds, int query, int key) {
    const int distance = key - query;
    return distance > bounds.lower && distance <= bounds.upper && (distance <= 0 || key < bounds.prefix) && key < bounds.keys
        && query < bounds.queries;
}

// Returns whether every query of [first_q, end_q) attends to every key of [first_k, end_k) by band, prefix and lengths.
inline bool all_in_bounds(Bounds bounds, int first_q, int end_q, int first_k, int end_k) {
    return first_k - (end_q - 1) > bounds.lower && end_k - 1 - first_q <= bounds.upper
        && (end_k - 1 <= first_q || end_k <= bounds.prefix) && end_k <= bounds.keys && end_q <= bounds.queries;
}

// The half-open range of keys to which some query of [first_q, end_q) may attend.
inline int2 keys_of(Bounds bounds, int first_q, int end_q) {
    if (first_q >= bounds.queries) {
        return int2(0, 0);
    }
    return int2(max(0, first_q + bounds.lower + 1), min(min(bounds.keys, end_q + bounds.upper), max(end_q, bounds.prefix)));
}

// The half-open range of queries that may attend to some key of [first_k, end_k).
inline int2 queries_of(Bounds bounds, int first_k, int end_k) {
    if (first_k >= bounds.keys) {
        return int2(0, 0);
    }
    const int from = max(first_k - bounds.upper, first_k >= bounds.prefix ? first_k : 0);
    return int2(max(0, from), min(bounds.queries, end_k - bounds.lower - 1));
}

// Lengths and bounds of the batch entry that a kernel processes.
#if WITH_SEQ_LEN_Q
#define QUERIES_LEFT clamp(seq_len_q[batch], 0, span_q.rows)
#else
#define QUERIES_LEFT span_q.rows
#endif
#if WITH_SEQ_LEN_KV
#define KEYS_LEFT clamp(seq_len_kv[batch], 0, span_k.rows)
#else
#define KEYS_LEFT span_k.rows
#endif
#define LEFT Bounds{params.lower, params.upper, params.prefix, QUERIES_LEFT, KEYS_LEFT}
#if WITH_ENDS
#define BOUNDS about_ends(LEFT, params.ends_lower, params.ends_upper)
#else
#define BOUNDS LEFT
#endif

// Kernel arguments that exist only with per-sequence lengths.
#if WITH_SEQ_LEN_Q
#define SEQ_LEN_Q_ARGUMENT const device int* seq_len_q [[buffer(6)]],
#else
#define SEQ_LEN_Q_ARGUMENT
#endif
#if WITH_SEQ_LEN_KV
#define SEQ_LEN_KV_ARGUMENT const device int* seq_len_kv [[buffer(7)]],
#else
#define SEQ_LEN_KV_ARGUMENT
#endif
