// The steps of a block of threads of the backward kernel: tiles of queries of one head after the other, of those that share its keys.

// The query heads that a block of threads has of those that share its key head, first <= of < past.
struct Heads {
    int first, past;
};

inline Heads heads_of(const Params& p, const Tile& tile) {
#if WITH_SHARES
    return Heads{p.group * tile.share / p.shares, p.group * (tile.share + 1) / p.shares};
#else
    return Heads{0, p.group};
#endif
}

// A tile of queries of a head, and whether the mask is needed.
struct Step {
    int head, queries;
    bool partly;
};

struct Steps {
    int of, past;
    Walk walk;
};

inline Steps steps_of(const Params& p, const Reach& reach, const Tile& tile) {
    const Heads heads = heads_of(p, tile);
    return Steps{heads.first, heads.past, walk_of(p, reach, tile.batch, tile.head * p.group + heads.first, tile.block)};
}

// The next step; false where there is none.
inline bool step_on(Steps& steps, const Params& p, const Reach& reach, const Tile& tile, Step& step) {
    while (true) {
        if (walk_on(steps.walk, p, reach, step.queries, step.partly)) {
            step.head = tile.head * p.group + steps.of;
            return true;
        }
        if (++steps.of >= steps.past) return false;
        steps.walk = walk_of(p, reach, tile.batch, tile.head * p.group + steps.of, tile.block);
    }
}
