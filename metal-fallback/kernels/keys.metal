// Which keys a query keeps.

// Rules on the two indices, and what lengths leave of both.
struct Bounds {
    int lower;
    int upper;
    int prefix;
    int queries;
    int keys;
};

// A band besides, about the last query and the last key that are left: beside the first ones it lies so much further on.
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

// Whether every query of first_q .. end_q keeps every key of first_k .. end_k.
inline bool all_in_bounds(Bounds bounds, int first_q, int end_q, int first_k, int end_k) {
    return first_k - (end_q - 1) > bounds.lower && end_k - 1 - first_q <= bounds.upper
        && (end_k - 1 <= first_q || end_k <= bounds.prefix) && end_k <= bounds.keys && end_q <= bounds.queries;
}

// The keys that some query of first_q .. end_q may keep: from the first to before the second.
inline int2 keys_of(Bounds bounds, int first_q, int end_q) {
    if (first_q >= bounds.queries) {
        return int2(0, 0);
    }
    return int2(max(0, first_q + bounds.lower + 1), min(min(bounds.keys, end_q + bounds.upper), max(end_q, bounds.prefix)));
}

// The queries that may keep some key of first_k .. end_k.
inline int2 queries_of(Bounds bounds, int first_k, int end_k) {
    if (first_k >= bounds.keys) {
        return int2(0, 0);
    }
    const int from = max(first_k - bounds.upper, first_k >= bounds.prefix ? first_k : 0);
    return int2(max(0, from), min(bounds.queries, end_k - bounds.lower - 1));
}

// What a kernel knows of its batch entry.
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

// The arguments that not every kernel has.
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
