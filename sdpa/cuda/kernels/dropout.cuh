// Dropout: the generator of sdpa_core::DropoutMask, evaluated for all scores of a thread. Both passes recompute the mask from seed and offset.

struct RandomWords {
    uint word[4];
};

// Philox4x32-7.
inline RandomWords philox(RandomWords counter, uint key_low, uint key_high) {
#pragma unroll
    for (int round = 0; round < 7; round++) {
        const ulong64 one = ulong64(0xd2511f53u) * counter.word[0], two = ulong64(0xcd9e8d57u) * counter.word[2];
        counter = RandomWords{uint(two >> 32) ^ counter.word[1] ^ key_low, uint(two), uint(one >> 32) ^ counter.word[3] ^ key_high, uint(one)};
        key_low += 0x9e3779b9u;
        key_high += 0xbb67ae85u;
    }
    return counter;
}

// The four random words that decide on (q, k). They also serve the key k ^ 8 and the queries q ^ 1 and q ^ 8: bit 0 of the word index is bit 3 of the
// key, bit 1 is bit 3 of the query. A word has 16 random bits for each of two neighbouring queries, the lower half for the even one.
inline RandomWords random_words(const Params& p, int batch, int head, uint q, uint k) {
    const ulong64 row = ulong64(batch) * p.heads_q + head, n = *p.dropout_offset + 4 * (row * 8 + k % 8) + q % 8 / 2, seed = *p.dropout_seed;
    const uint square = k / 16 * ((p.seq_q + 15) / 16) + q / 16;
    return philox(RandomWords{uint(n >> 2), uint(n >> 34), square, 0}, uint(seed), uint(seed >> 32));
}

inline bool survives(const Params& p, uint word, uint odd) {
    return (odd ? word >> 16 : word & 0xffffu) <= uint(p.dropout_threshold);
}

// Forward: calls `each` for all scores of a thread. The thread has queries q and q + 8, where q % 16 < 8, and keys k and k + 1 of every 8.
template <int scores, class Each>
inline void dropout_of_queries(const Params& p, int batch, int head, int q, int k, Each each) {
#pragma unroll
    for (int n = 0; n < scores; n += 8) {
#pragma unroll
        for (int other = 0; other < 2; other++) {
            const RandomWords words = random_words(p, batch, head, q, k + 2 * n + other);
#pragma unroll
            for (int m = other; m < 8; m += 2) each(n + m, survives(p, words.word[m / 4 + (m & 2)], q & 1));
        }
    }
}

// Backward, where S is transposed: a thread has keys k and k + 8, and queries q and q + 1 of every 8.
template <int scores, class Each>
inline void dropout_of_keys(const Params& p, int batch, int head, int q, int k, Each each) {
#pragma unroll
    for (int n = 0; n < scores; n += 8) {
        const RandomWords words = random_words(p, batch, head, q + 2 * n, k);
#pragma unroll
        for (int m = 0; m < 8; m++) each(n + m, survives(p, words.word[(m >> 1 & 1) + m / 4 * 2], m & 1));
    }
}

// For packed GQA tiles of at most 8 queries: calls `each` for the scores of one query only, which are every other pair of registers. `half` selects the
// pairs.
template <int scores, class Each>
inline void dropout_of_query(const Params& p, int batch, int head, int q, int k, int half, Each each) {
#pragma unroll
    for (int n = 0; n < scores; n += 8) {
#pragma unroll
        for (int other = 0; other < 2; other++) {
            const RandomWords words = random_words(p, batch, head, q, k + 2 * n + other);
#pragma unroll
            for (int m = 0; m < 2; m++) each(n + 4 * m + 2 * half + other, survives(p, words.word[m], q & 1));
        }
    }
}
