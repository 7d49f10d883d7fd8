// Types that everything else is told in.

typedef unsigned int uint;
typedef unsigned long long ulong64;

// What the copy engine knows of a tensor, encoded by the driver.
struct alignas(64) TensorMap {
    ulong64 words[16];
};

// A tile of queries of a batch entry, in a list of them, and which of so many parts of its keys.
struct alignas(16) TileItem {
    int batch, tile, split, splits;
};

// Where a score stands.
struct Place {
    int batch, head, query, key;
    // How far behind what all scores of a thread have in common, as far as the compiler knows it.
    int query_on, key_on;
};
