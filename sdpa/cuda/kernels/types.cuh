// Types of every kernel. Host code fills TensorMap and Params by value.

typedef unsigned int uint;
typedef unsigned long long ulong64;

// A TMA descriptor, encoded by the driver (cuTensorMapEncodeTiled).
struct alignas(64) TensorMap {
    ulong64 words[16];
};

// An entry of the tile list: a query tile of a sequence, and which of how many splits of its keys.
struct alignas(16) TileItem {
    int batch, tile, split, splits;
};

// Position of a score: what score_mods and masks are evaluated at.
struct Place {
    int batch, head, query, key;
    // Compile-time offsets from the position that the thread's scores have in common.
    int query_on, key_on;
};
