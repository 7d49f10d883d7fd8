// Parameter gradients: contributions of scores, summed over a thread and a warp before the atomic additions. Code that source.rs generates for the
// backward kernels calls this.

// Runs `something` for the lanes where `contains` is true, one after the other, so that additions have a fixed order.
template <class Do>
inline void lane_by_lane(bool contains, Do something) {
    for (uint left = __ballot_sync(~0u, contains); left != 0; left &= left - 1) {
        if ((left & -left) >> (threadIdx.x & 31) == 1) something();
        __syncwarp();
    }
}

// Adds `x` of each score to the parameter gradient; `to` gives the address of an element. The parameter spans queries if `by_q`, and keys if `by_k`.
template <bool by_q, bool by_k, class To>
inline void add_parameter_gradient(const float (&x)[SCORES], const Params& p, const FragmentOrigin& origin, To to) {
    const int lane = threadIdx.x & 31;
    if (by_q && by_k) {
#pragma unroll
        for (int n = 0; n < SCORES; n++) {
            if (x[n] != 0.0f) atomicAdd(to(place_of_score(p, origin, n)), x[n]);
        }
        return;
    }
    // Sum the thread's scores for each query or key that the parameter spans, then sum over the lanes that share the query or key.
    constexpr int count = by_q ? SCORES / 2 : by_k ? 2 : 1;
    float sum[count];
#pragma unroll
    for (int m = 0; m < count; m++) sum[m] = 0.0f;
#pragma unroll
    for (int n = 0; n < SCORES; n++) sum[by_q ? n / 4 * 2 + (n & 1) : by_k ? fragment_half(n) : 0] += x[n];
#pragma unroll
    for (int m = 0; m < count; m++) {
        for (int apart = by_q ? 4 : 1; apart < (by_k ? 4 : 32); apart *= 2) sum[m] += __shfl_xor_sync(~0u, sum[m], apart);
        const bool first = by_q ? lane < 4 : by_k ? (lane & 3) == 0 : lane == 0;
        if (first && sum[m] != 0.0f) atomicAdd(to(place_of_score(p, origin, by_q ? m / 2 * 4 + (m & 1) : 2 * m)), sum[m]);
    }
}
