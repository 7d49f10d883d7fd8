// Around the backward kernel: what it reads of each row, and what becomes of its sums.

// A row of a tensor of queries.
inline const Element* row_of(const void* at, long batch_stride, long head_stride, long row_stride, const Span& s, int batch, int head, int row) {
    const long of_batch = WITH_PACKED_Q ? s.begin_q * row_stride : batch * batch_stride;
    return static_cast<const Element*>(at) + of_batch + head * head_stride + row * row_stride;
}

// Of each row of each head, tiles filled up: the log-sum-exp in units of the exponent of 2, infinite where the row has no weights, and the sum of
// `o` times `d_o`. A warp has a row.
extern "C" __global__ void __launch_bounds__(256, 1) attention_rows(const __grid_constant__ Params p) {
    const int lane = threadIdx.x & 31, rows = p.tiles * TILE_M;
    const long number = long(blockIdx.x) * 8 + (threadIdx.x >> 5);
    if (number >= long(p.batch) * p.heads_q * rows) return;
    const int row = int(number % rows), head = int(number / rows % p.heads_q), batch = int(number / rows / p.heads_q);
    const Span span = span_of(p, batch);
    const int tile = row / TILE_M, extent = WITH_PACKED_Q ? span.len_q : p.seq_q;
    // Tiles are as many as the longest document may have.
    if (tile * TILE_M >= extent) return;
    const bool there = row < extent;
    const long of_row = WITH_PACKED_Q ? long(span.begin_q + row) * p.heads_q + head : (long(batch) * p.heads_q + head) * p.seq_q + row;
    const float stat = there ? p.stats[of_row] : -INFINITE;
    const bool any = stat != -INFINITE && row < span.len_q;
    float sum = 0.0f;
    if (there) {
        const Element* o = row_of(p.o, p.o_batch, p.o_head, p.o_row, span, batch, head, row);
        const Element* d_o = row_of(p.d_o, p.d_o_batch, p.d_o_head, p.d_o_row, span, batch, head, row);
        for (int dim = lane; dim < p.dim_v; dim += 32) {
            const Element upstream = d_o[dim * p.d_o_dim];
            if (any) sum += float(o[dim]) * float(upstream);
            if (p.d_o_copy) p.d_o_copy[((long(batch) * p.heads_q + head) * p.seq_q + row) * p.copy_row + dim] = upstream;
        }
    }
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    if (lane == 0) {
        const long to = tile_place(p, span, batch, head, tile) * TILE_M + row % TILE_M;
        p.lse[to] = any ? stat * LOG2_E : INFINITE;
        p.delta[to] = sum;
#if WITH_SINK_GRADIENT
        if (any) atomicAdd(p.sink_gradient + head, -exp2_of((p.sink[head] - stat) * LOG2_E) * sum);
#endif
    }
}

// Sums of gradients of queries, as the threads of a group had them, to their places.
extern "C" __global__ void __launch_bounds__(128, 1) attention_queries(const __grid_constant__ Params p) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, slice = blockIdx.x % SLICES;
    const int number = blockIdx.x / SLICES, tile = number % p.tiles, head = number / p.tiles % p.heads_q, batch = number / p.tiles / p.heads_q;
    const Span span = span_of(p, batch);
    const int extent = WITH_PACKED_Q ? span.len_q : p.seq_q;
    if (tile * TILE_M >= extent) return;
    const float4* from = reinterpret_cast<const float4*>(p.sums) + (tile_place(p, span, batch, head, tile) * SLICES + slice) * 1024 + threadIdx.x;
    const int first = tile * TILE_M + (TILE_M == 128 ? slice * 64 : 0) + warp * 16 + lane / 4;
    const int column = (TILE_M == 128 ? 0 : slice * PANEL) + 2 * (lane & 3);
    for (int n = 0; n < 8; n++) {
        const float4 of = from[n * 128];
        const int dim = column + 8 * n;
        if (dim >= p.dim_qk) break;
        for (int half = 0; half < 2; half++) {
            const int row = first + 8 * half;
            if (row >= extent) continue;
            const uint both = half ? pair_of(Element{}, of.z * p.scale, of.w * p.scale) : pair_of(Element{}, of.x * p.scale, of.y * p.scale);
            *reinterpret_cast<uint*>(const_cast<Element*>(row_of(p.dq, p.dq_batch, p.dq_head, p.dq_row, span, batch, head, row)) + dim) = both;
        }
    }
}

// Sums of the gradient of a parameter, rounded: to f16 where `half` is 1, else to bf16.
extern "C" __global__ void __launch_bounds__(256, 1) attention_rounded(const float* from, unsigned short* to, long count, long half) {
    const long at = long(blockIdx.x) * 256 + threadIdx.x;
    if (at < count) to[at] = (unsigned short)((half ? pair_of(Half{}, from[at], 0.0f) : pair_of(BFloat{}, from[at], 0.0f)) & 0xffffu);
}
