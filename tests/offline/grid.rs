//! A grid of the kernels beside cuDNN's, for a CPU: thread by thread, none waits for another. Where a warp waits for its lanes, the last one comes last.

/// What stands before a source.
pub(crate) const BEFORE: &str = "#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#define __device__
#define __global__
#define __syncwarp()
struct Place { unsigned x; };
static Place blockIdx, blockDim, threadIdx;
";

/// What stands behind it and its numbers, `jobs`: buffers with something around them, and launches.
pub(crate) const TOOLS: &str = "
static const number *next = jobs;
// Elements of 16 bits or more are as aligned behind it as before.
static const number guard = 16;

static char *buffer(number count, number bytes) {
    size_t all = static_cast<size_t>((count + 2 * guard) * bytes);
    char *made = static_cast<char *>(malloc(all));
    memset(made, 0x5a, all);
    return made + guard * bytes;
}

template <typename Run> static void launch(number blocks, unsigned threads, Run run) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) run();
}
";

/// A source with what it includes.
pub(crate) fn whole(source: &str) -> String {
    source.replace("#include \"elements.cuh\"", include_str!("../../sdpa/cudnn/src/kernels/elements.cuh"))
}
