// Which blocks of keys there are, in which order they are taken, and where sums of gradients of queries lie meanwhile. Key heads are taken in sections, so that what one
// sums up is in the cache from its zeros on until it leaves; its place is then another section's.

// Blocks of threads that a block of keys has.
inline int shares_of(const Params& p) {
    return WITH_SHARES ? p.shares : 1;
}

inline int all_key_heads(const Params& p) {
    return p.batch * (p.heads_q / p.group);
}

// Key heads of a section.
inline int heads_in(const Params& p, int section) {
    return min(p.section, all_key_heads(p) - section * p.section);
}

// Numbers that stand for a section's blocks of keys.
inline int numbers_in(const Params& p, int section) {
    return heads_in(p, section) * p.blocks * shares_of(p);
}

// Slices of the sums of a section.
inline int slices_in(const Params& p, int section) {
    return heads_in(p, section) * p.group * p.tiles * SLICES;
}

// A number of all that are counted. Of a section, blocks of the first keys come first: causal masks leave them the most.
inline Tile tile_of(const Params& p, int number) {
    const int shares = shares_of(p), of = number / shares, block = of / PARTS;
    const int section = block / (p.section * p.blocks), together = heads_in(p, section);
    const int in_section = block - section * p.section * p.blocks, unit = in_section % together, both = section * p.section + unit;
    const int heads_kv = p.heads_q / p.group, slot = p.ring > 0 ? section % p.ring * p.section + unit : 0;
    return Tile{in_section / together, both / heads_kv, both % heads_kv, of % PARTS, number - of * shares, of, section, slot};
}

// Whether a document has no such block: they are as many as the longest may have.
inline bool is_none(const Params& p, const Tile& tile) {
    return WITH_PACKED_KV && tile.block * TILE_N >= span_of(p, tile.batch).len_kv;
}

// Where a slice of the sums of a tile of queries lies: in the ring of sections, or where each tile of every head has a place.
inline float* slice_at(const Params& p, const Span& span, const Tile& tile, int head, int queries, int slice) {
    const long place = p.ring > 0 ? (long(tile.slot) * p.group + head - tile.head * p.group) * p.tiles + queries
                                  : tile_place(p, span, tile.batch, head, queries);
    return p.sums + (place * SLICES + slice) * SLICE;
}

// Takes 16 rows of a panel of columns out of shared memory: of a document as far as it has rows, and of a tensor as far as it has panels.
template <bool packed>
inline void rows_out(uint from, const TensorMap& map, int panel, int panels, int row, int begin, int length, int head, int batch) {
#if WITH_PACKED_Q || WITH_PACKED_KV
    if (packed) {
        const Clipped cut = clipped<16>(begin, length, row);
        if (row < length && panel < panels) tma_store<true>(from, map, panel * PANEL, cut.skipped, head, cut.end);
        return;
    }
#endif
    tma_store<true>(from, map, panel * PANEL, row, head, batch);
}

// Numbers that the threads of a block are told of, one after the other: two at once.
struct Told {
    int count = 0;
    inline uint place(const Shared& at) const { return at.told + 4 * (count & 1); }
    inline uint full(const Shared& at) const { return at.told_full + 8 * (count & 1); }
    inline uint free(const Shared& at) const { return at.told_free + 8 * (count & 1); }
    inline uint phase() const { return count >> 1 & 1; }
};

// The next number, for a warp.
inline int next_of(Told& told, const Shared& at) {
    mbarrier_wait_parity(told.full(at), told.phase());
    const int number = alike(int(ld_shared(told.place(at))));
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(told.free(at));
    told.count++;
    return number;
}

// The next number, taken by one thread for all.
inline int take_next(Told& told, const Params& p, const Shared& at) {
    mbarrier_wait_parity(told.free(at), told.phase() ^ 1);
    const int number = atomicAdd(p.taken, 1);
    st_shared(told.place(at), uint(number));
    mbarrier_arrive(told.full(at));
    told.count++;
    return number;
}
