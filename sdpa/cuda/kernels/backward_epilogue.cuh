// Gradients from accumulator registers to memory: dQ reductions, dK and dV stores, and sums over head splits. Called by the sm_90 backward kernels.

// Adds a dQ slice to the accumulator, four f32 per red instruction. The base address is opaque to the compiler, so that it uses one register and
// immediate offsets.
inline void red_add_dq(const float (&sums)[DQ], float* to) {
    to = opaque_address(to + (threadIdx.x & 127) * 4);
#pragma unroll
    for (int n = 0; n < DQ; n += 4) red_add_v4_f32(to + n * 128, sums[n], sums[n + 1], sums[n + 2], sums[n + 3]);
}

// Stores a warp's 16 rows of dK or dV: to shared memory in panels, then by TMA.
template <uint panel_bytes, int count>
inline void store_gradient(const float (&sums)[count], float scale, uint rows_at, const TensorMap& map, int panels, int first_panel, int first_row,
                           const SeqInfo& seq_info, const Tile& tile) {
    const int lane = threadIdx.x & 31, in_warp = thread_row(lane);
#pragma unroll
    for (int n = 0; n < count; n += 2) {
        const int half = fragment_half(n), chunk = n / 4;
        const uint to = rows_at + chunk / 8 * panel_bytes + (in_warp + 8 * half) * ROW_BYTES + ((chunk % 8 ^ in_warp) << 4) + (lane & 3) * 4;
        st_shared(to, pack_pair(Element{}, sums[n] * scale, sums[n + 1] * scale));
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
        for (int panel = 0; panel < count * 2 / PANEL; panel++) {
            tma_store_rows<WITH_PACKED_KV>(rows_at + panel * panel_bytes, map, first_panel + panel, panels, first_row,
                                           seq_info.begin_kv, seq_info.len_kv, tile.head, tile.batch);
        }
        cp_async_bulk_commit_group();
    }
}

// Index of the thread's first query among the rows of all query tiles. `first` is the warpgroup's first row of the tile.
inline int dq_place(const Params& p, const SeqInfo& seq_info, const Tile& tile, const Step& step, int first) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    return int(q_tile_index(p, seq_info, tile.batch, step.head, step.queries)) * TILE_M + first + warp * 16 + thread_row(lane);
}

// Loads the fixed-point scales of a thread's queries. The loads overlap the GEMM of dQ.
inline float2 dq_scales(const Params& p, DqPlace place) {
#if FIXED_POINT_DQ
    return float2{p.dq_scale[place], p.dq_scale[place + 8]};
#else
    return float2{0.0f, 0.0f};
#endif
}

#if WITH_HEAD_SPLITS
// This thread's elements of the sums over head splits, in register order. In a deterministic pass each head split stores its own, `apart` elements from the
// next one's, and they are added in the order of the splits.
struct SplitSum {
    float* own;
    const float* first;
    int splits, apart;
    inline SplitSum beyond(int elements) const { return SplitSum{own + elements, first + elements, splits, apart}; }
};

// `at` is where the thread's warpgroup begins among the `each` elements of a KV block.
inline SplitSum split_sum_of(const Params& p, const Tile& tile, int at, int each) {
    const int splits = FIXED_POINT_DQ ? p.head_splits : 1;
    float* const first = p.dkv_accum + long(tile.tile_index) * splits * each + at + (threadIdx.x & 127) * 4;
    return SplitSum{first + (FIXED_POINT_DQ ? tile.head_split * each : 0), first, splits, each};
}

// Adds this CTA's dK or dV.
template <int count>
inline void add_split(const SplitSum& sum, const float (&sums)[count]) {
#pragma unroll
    for (int n = 0; n < count; n += 4) {
#if FIXED_POINT_DQ
        *reinterpret_cast<float4*>(sum.own + n * 128) = float4{sums[n], sums[n + 1], sums[n + 2], sums[n + 3]};
#else
        red_add_v4_f32(sum.own + n * 128, sums[n], sums[n + 1], sums[n + 2], sums[n + 3]);
#endif
    }
}

template <int count>
inline void load_split_sum(float (&sums)[count], const SplitSum& sum) {
#pragma unroll
    for (int n = 0; n < count; n += 4) {
        const float4 four = __ldcg((const float4*)(sum.first + n * 128));
        sums[n] = four.x, sums[n + 1] = four.y, sums[n + 2] = four.z, sums[n + 3] = four.w;
    }
    for (int split = 1; split < sum.splits; split++) {
        const float* const from = sum.first + split * sum.apart;
#pragma unroll
        for (int n = 0; n < count; n += 4) {
            const float4 four = __ldcg((const float4*)(from + n * 128));
            sums[n] += four.x, sums[n + 1] += four.y, sums[n + 2] += four.z, sums[n + 3] += four.w;
        }
    }
}

// Returns whether this CTA is the last of the head splits to finish, so that the sum is complete. Both consumers synchronise twice; afterwards both are
// done with their operands in shared memory.
template <class Sync>
inline bool is_last_split(const Params& p, const SharedStorage& smem, const Tile& tile, const Sync& warpgroups_sync) {
    __threadfence();
    warpgroups_sync(0);
    if (threadIdx.x == 128) st_shared(smem.last, atomicAdd(p.splits_done + tile.tile_index, 1) + 1 == p.head_splits);
    warpgroups_sync(1);
    const bool last = ld_shared(smem.last) != 0;
    __threadfence();
    return last;
}
#endif
