// Adds up partial sums of the gradient of a declared parameter: each element is the sum over the axes that the parameter does not span.
// One simdgroup per element.

kernel void attention_sum(
    constant SumParams& params [[buffer(4)]],
    const device float* parts [[buffer(9)]],
    device Gradient* gradient [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    const long element = long(group.x) * (THREADS / 32) + long(simdgroup);
    if (element >= params.elements) {
        return;
    }
    long first = 0;
    long rest = element;
    long n = 1;
    for (int axis = 3; axis >= 0; axis--) {
        first += rest % params.spanned[axis] * params.strides[axis];
        rest /= params.spanned[axis];
        n *= params.summed[axis];
    }
    float sum = 0.0f;
    for (long part = long(lane); part < n; part += 32) {
        long at = first;
        long left = part;
        for (int axis = 3; axis >= 0; axis--) {
            at += left % params.summed[axis] * params.strides[axis];
            left /= params.summed[axis];
        }
        sum += parts[at];
    }
    sum = simd_sum(sum);
    if (lane == 0) {
        gradient[element] = Gradient(sum);
    }
}
