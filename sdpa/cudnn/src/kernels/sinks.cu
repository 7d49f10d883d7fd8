// Sinks for passes in which engines do not support them: after the attention, the sink is added to each row's denominator; after the backward pass, the
// gradient of the sink is summed.

#include "elements.cuh"

// Adds the sink to the output and stats of rows that were computed without it. One warp per row of (batch, heads, rows).
extern "C" __global__ void sink_rows(number count, number heads, number rows, const float *sink, float *stats, number told, char *o, number type,
                                     number width, number entry, number head, number row) {
    number n = ((number)blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (n >= count) return;
    number h = n / rows % heads;
    float own = sink[h], before = stats[n];
    if (own == none()) return;
    float factor = 1.0f / (1.0f + expf(own - before));
    number first = n / rows / heads * entry + h * head + n % rows * row;
    for (number i = lane; i < width; i += 32) store(o, type, first + i, load(o, type, first + i) * factor);
    // Wait until every lane has read stats[n], because lane 31 overwrites it below.
    __syncwarp();
    if (told && lane == 31) stats[n] = (own > before ? own : before) + log1pf(expf(-fabsf(own - before)));
}

// Computes partial sums of the sink's gradient: one thread block per head, one partial sum per thread. `sums` holds o * dO summed over each row: in the
// layout of `stats` if `alike` is set, otherwise dense over (batch, heads, longest).
extern "C" __global__ void sink_parts(number batch, number heads, number longest, const int *lengths, const number *begins, const float *sink,
                                      const float *stats, number entry, number head, number row, const float *sums, number alike, float *parts) {
    number h = blockIdx.x;
    float own = sink[h], part = 0.0f;
    for (number b = 0; b < batch && own != none(); b++) {
        number rows = lengths && lengths[b] < longest ? lengths[b] : longest, first = (begins ? begins[b] : b * entry) + h * head;
        for (number q = threadIdx.x; q < rows; q += blockDim.x) {
            float statistic = stats[first + q * row];
            if (statistic != none()) part -= expf(own - statistic) * sums[alike ? first + q * row : (b * heads + h) * longest + q];
        }
    }
    parts[h * blockDim.x + threadIdx.x] = part;
}

// Adds up the partial sums of each head, one thread per head, and multiplies the total by an f32, whose bits are `factor`.
extern "C" __global__ void sink_gradient(number heads, const float *parts, number each, char *to, number type, number factor) {
    number h = (number)blockIdx.x * blockDim.x + threadIdx.x;
    if (h >= heads) return;
    double sum = 0.0;
    for (number n = 0; n < each; n++) sum += (double)parts[h * each + n];
    store(to, type, h, (float)(sum * (double)of_bits((unsigned)factor)));
}
