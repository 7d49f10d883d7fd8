// The kernels that run after a backward pass with gradients of parameters.

// Converts a summed parameter gradient to f16 if `half` is 1, else to bf16.
extern "C" __global__ void __launch_bounds__(256, 1) attention_convert_gradient(const float* from, unsigned short* to, long count, long half) {
    const long at = long(blockIdx.x) * 256 + threadIdx.x;
    if (at < count) to[at] = (unsigned short)((half ? pack_pair(Half{}, from[at], 0.0f) : pack_pair(BFloat{}, from[at], 0.0f)) & 0xffffu);
}

// Deterministic parameter gradients: sums the partial results of warps, `from` of shape (batch, heads, slots, inner), in a fixed order. The gradient `to`
// has an axis of batch entries if bit 0 of `spans` is set, and of heads if bit 1 is set. 1 or 32 lanes share an element of `to`.
extern "C" __global__ void __launch_bounds__(256, 1)
    attention_reduce_gradient(const float* from, float* to, long batch, long heads, long slots, long inner, long spans, long lanes) {
    const long thread = long(blockIdx.x) * 256 + threadIdx.x, element = thread / lanes;
    const long own_batch = spans & 1 ? batch : 1, own_heads = spans & 2 ? heads : 1;
    if (element >= own_batch * own_heads * inner) return;
    const long of_row = element / inner, of_batch = of_row / own_heads, of_head = of_row % own_heads;
    const long more_heads = heads / own_heads, terms = batch / own_batch * more_heads * slots;
    float sum = 0.0f;
    for (long term = thread % lanes; term < terms; term += lanes) {
        const long row = (of_batch + term / slots / more_heads) * heads + of_head + term / slots % more_heads;
        sum += from[(row * slots + term % slots) * inner + element % inner];
    }
    for (int apart = int(lanes) / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    if (thread % lanes == 0) to[element] = sum;
}
