// Sinks where engines do not know them: a row's denominator gets one term more after the attention, and the gradient of that term is summed
// behind the backward pass.

#include "elements.cuh"

// Makes of the output and the stats of rows without a sink those with one. A warp for each row of (batch, heads, rows).
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
    // Every lane has read the statistic.
    __syncwarp();
    if (told && lane == 31) stats[n] = (own > before ? own : before) + log1pf(expf(-fabsf(own - before)));
}

// What rows add to the gradient of the sink of their head: a block for each head, and a part for each of its threads. Row sums are those of
// o times its gradient, dense over (batch, heads, longest) where they do not lie as stats do.
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

// Adds the parts of each head, a thread for each, and multiplies them by an f32, which is given as its bits.
extern "C" __global__ void sink_gradient(number heads, const float *parts, number each, char *to, number type, number factor) {
    number h = (number)blockIdx.x * blockDim.x + threadIdx.x;
    if (h >= heads) return;
    double sum = 0.0;
    for (number n = 0; n < each; n++) sum += (double)parts[h * each + n];
    store(to, type, h, (float)(sum * (double)of_bits((unsigned)factor)));
}
