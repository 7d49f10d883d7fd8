// Types shared by all kernels. The host fills in TensorMap and Params, and passes them to a kernel by value.

typedef unsigned int uint;
typedef unsigned long long ulong64;

// A TMA descriptor, encoded by the driver (cuTensorMapEncodeTiled).
struct alignas(64) TensorMap {
    ulong64 words[16];
};

// An entry of the tile list: query tile `tile` of sequence `batch`. With split-KV its keys are divided into `splits` splits, and the entry stands for
// number `split`.
struct alignas(16) TileItem {
    int batch, tile, split, splits;
};

// The position of a score, at which score_mods and masks are evaluated.
struct Place {
    int batch, head, query, key;
    // Compile-time parts of `query` and `key`. After subtracting them, many scores of a thread have the same position (see float_from).
    int query_on, key_on;
};
