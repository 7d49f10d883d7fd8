// Which tiles there are, in which order they are taken, and where their rows lie.

// A tile of queries of heads that share keys: the first of the heads.
struct Tile {
    int tile, batch, head;
};

// How many tiles a head has, of one batch entry, or of all where a list has them: of documents this is known on the device alone.
inline int tiles_of_head(const Params& p) {
#if WITH_LIST
    return p.taken[1];
#else
    return p.tiles;
#endif
}

// Heads that have so many tiles.
inline int all_heads(const Params& p) {
    return WITH_LIST ? p.heads_q : p.batch * p.heads_q;
}

// Heads whose keys and values fit the cache together follow one another; of these, tiles with the most keys of causal masks come first.
inline Tile tile_of(const Params& p, int tiles, int number) {
    const int first = number / (p.section * tiles) * p.section, together = min(p.section, all_heads(p) - first);
    const int in_section = number - first * tiles;
    const int both = first + in_section % together;
#if WITH_LIST
    const Item item = p.items[in_section / together];
    return Tile{item.tile, item.batch, both};
#else
    return Tile{tiles - 1 - in_section / together, both / p.heads_q, both % p.heads_q};
#endif
}

// Where the statistics of a query are.
inline long stats_place(const Params& p, const Span& s, int batch, int head, int q) {
#if WITH_PACKED_Q
    return long(s.begin_q + q) * p.heads_q + head;
#else
    return (long(batch) * p.heads_q + head) * p.seq_q + q;
#endif
}

#if WITH_PACKED_Q || WITH_PACKED_KV
// Rows of a document behind its end are the next one's. The map of a packed tensor has two axes of tokens, which add up: one ends behind as many tokens
// as a box has, so that of a box which begins there before its first row only rows of the document are inside. Such a map begins a box before the tensor.
struct Clipped {
    int skipped;  // along the axis that ends
    int end;      // along the other: behind the last row of the box that is of the document
};

template <int rows>
inline Clipped clipped(int begin, int length, int first) {
    const int left = min(rows, length - first);
    return Clipped{rows - left, begin + first + left};
}
#endif
