// Dropout: the generator of sdpa_core::DropoutMask, evaluated for one (query, key) pair at a time.

#if WITH_DROPOUT
struct Words {
    uint word[4];
};

// Philox4x32 with seven rounds.
inline Words philox(Words counter, uint key_low, uint key_high) {
    for (int round = 0; round < 7; round++) {
        const ulong one = ulong(0xd2511f53u) * counter.word[0];
        const ulong two = ulong(0xcd9e8d57u) * counter.word[2];
        counter = Words{{uint(two >> 32) ^ counter.word[1] ^ key_low, uint(two), uint(one >> 32) ^ counter.word[3] ^ key_high, uint(one)}};
        key_low += 0x9e3779b9u;
        key_high += 0xbb67ae85u;
    }
    return counter;
}

// The factor of P at `place`, which is (batch, head, query, key): 0 if dropout drops the entry, else DROPOUT_SCALE.
inline float left_of(int4 place, int heads, int seq_q, Captured captured) {
    const uint query = uint(place.z);
    const uint key = uint(place.w);
    const ulong row = ulong(place.x) * ulong(heads) + ulong(place.y);
    const ulong n = ulong(DROPOUT_OFFSET) + 4 * (row * 8 + key % 8) + query % 8 / 2;
    const ulong seed = ulong(DROPOUT_SEED);
    const uint square = key / 16 * ((uint(seq_q) + 15) / 16) + query / 16;
    const Words words = philox(Words{{uint(n >> 2), uint(n >> 34), square, 0}}, uint(seed), uint(seed >> 32));
    const uint word = words.word[key / 8 % 2 + query / 8 % 2 * 2];
    const uint half_word = query % 2 == 0 ? word & 0xffffu : word >> 16;
    return half_word <= DROPOUT_MOST ? as_type<float>(DROPOUT_SCALE) : 0.0f;
}
#endif
