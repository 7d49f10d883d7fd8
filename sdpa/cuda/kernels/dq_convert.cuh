// attention_convert_dq: scales the dQ accumulator, which is in register order, and converts it. It is a separate kernel for head dims above 128, where
// attention_backward has no shared memory left for the conversion.
extern "C" __global__ void __launch_bounds__(128, 1) attention_convert_dq(const __grid_constant__ Params p) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, slice = blockIdx.x % SLICES;
    const int index = blockIdx.x / SLICES, tile = index % p.tiles, head = index / p.tiles % p.heads_q, batch = index / p.tiles / p.heads_q;
    const SeqInfo seq_info = seq_info_of(p, batch);
    const int extent = rows_q(p, seq_info);
    if (tile * TILE_M >= extent) return;
    const long query_tile = q_tile_index(p, seq_info, batch, head, tile);
    const int first = tile * TILE_M + (TILE_M == 128 ? slice * 64 : 0) + warp * 16 + thread_row(lane);
    const int column = (TILE_M == 128 ? 0 : slice * PANEL) + thread_column(lane);
    // All loads are issued before the first store.
    float4 sums[8];
    float scales[2] = {p.scale, p.scale};
#if FIXED_POINT_DQ
    const ulong64* from = reinterpret_cast<const ulong64*>(p.dq_accum) + (query_tile * SLICES + slice) * 2048 + threadIdx.x;
    const ulong64 offset = ulong64(p.dq_parts[query_tile]) * (ulong64(INTEGER_OFFSET_BITS) << 32 | INTEGER_OFFSET_BITS);
    for (int half = 0; half < 2; half++) scales[half] *= inverse_of_scale(p.dq_scale[query_tile * TILE_M + warp * 16 + thread_row(lane) + 8 * half]);
    const auto pair_of = [&](ulong64 sum) {
        // Take the carry of the lower sum back from the upper one.
        const int lower = int(uint(sum - offset));
        return float2{__int2float_rn(lower), __int2float_rn(int((sum - offset - ulong64(long(lower))) >> 32))};
    };
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 one = pair_of(from[n * 256]), other = pair_of(from[n * 256 + 128]);
        sums[n] = float4{one.x, one.y, other.x, other.y};
    }
#else
    const float4* from = reinterpret_cast<const float4*>(p.dq_accum) + (query_tile * SLICES + slice) * 1024 + threadIdx.x;
#pragma unroll
    for (int n = 0; n < 8; n++) sums[n] = from[n * 128];
#endif
    Element* const rows[2] = {const_cast<Element*>(row_of(p.dq, p.dq_batch, p.dq_head, p.dq_row, seq_info, batch, head, first)),
                              const_cast<Element*>(row_of(p.dq, p.dq_batch, p.dq_head, p.dq_row, seq_info, batch, head, first + 8))};
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float4 sum = sums[n];
        const int dim = column + 8 * n;
        if (dim < p.dim_qk && first < extent) *reinterpret_cast<uint*>(rows[0] + dim) = pack_pair(Element{}, sum.x * scales[0], sum.y * scales[0]);
        if (dim < p.dim_qk && first + 8 < extent) *reinterpret_cast<uint*>(rows[1] + dim) = pack_pair(Element{}, sum.z * scales[1], sum.w * scales[1]);
    }
}
