// Rows distributed over the lanes of a simdgroup, for kernels for few queries: lane l holds the elements l, l + 32, l + 64 and so on.

// Query head and query of a row. Rows count all queries of the first head of a GQA group, then those of the next head.
struct Query {
    int head;
    int query;
};

// Rows past the last one are clamped to it.
inline Query query_at(int row, int head_kv, int seq_q, int group) {
    const int there = min(row, seq_q * group - 1);
    return Query{head_kv * group + there / seq_q, there % seq_q};
}

// Elements past DIM are 0.
template <int DIM, int PER_LANE>
inline void load_row(thread float* to, const device Element* from, long step, uint lane) {
    UNROLL for (int i = 0; i < PER_LANE; i++) {
        const int at = i * 32 + int(lane);
        to[i] = at < DIM ? float(from[at * step]) : 0.0f;
    }
}

// Dot product of two rows; all lanes receive it.
template <int PER_LANE>
inline float product_of(const thread float* a, const thread float* b) {
    float sum = 0.0f;
    UNROLL for (int i = 0; i < PER_LANE; i++) {
        sum += a[i] * b[i];
    }
    return simd_sum(sum);
}

// sum += weight * row.
template <int PER_LANE>
inline void add_row(thread float* sum, float weight, const thread float* row) {
    UNROLL for (int i = 0; i < PER_LANE; i++) {
        sum[i] += weight * row[i];
    }
}

template <int PER_LANE>
inline void clear_row(thread float* row) {
    UNROLL for (int i = 0; i < PER_LANE; i++) {
        row[i] = 0.0f;
    }
}

// Stores this simdgroup's row, times `factor`, in threadgroup memory, where each simdgroup has a row.
template <int DIM, int PER_LANE>
inline void tell_row(threadgroup float* rows, const thread float* row, float factor, uint simdgroup, uint lane) {
    UNROLL for (int i = 0; i < PER_LANE; i++) {
        const int at = i * 32 + int(lane);
        if (at < DIM) {
            rows[int(simdgroup) * DIM + at] = row[i] * factor;
        }
    }
}

// The sum of an element over the simdgroups.
template <int DIM>
inline float total_at(const threadgroup float* rows, int at) {
    float sum = 0.0f;
    for (int s = 0; s < THREADS / 32; s++) {
        sum += rows[s * DIM + at];
    }
    return sum;
}
