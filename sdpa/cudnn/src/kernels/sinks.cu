// Sinks where engines do not know them: a row's denominator gets one term more after the attention, and the gradient of that term is summed
// behind the backward pass.

typedef long long number;

union Bits {
    float value;
    unsigned bits;
};

static __device__ float of_bits(unsigned bits) {
    Bits it;
    it.bits = bits;
    return it.value;
}

static __device__ unsigned to_bits(float value) {
    Bits it;
    it.value = value;
    return it.bits;
}

static __device__ float none() { return of_bits(0xff800000u); }

static __device__ float from_f16(unsigned short x) {
    unsigned sign = (x & 0x8000u) << 16, exponent = x >> 10 & 31u, rest = x & 0x3ffu;
    if (exponent == 31) return of_bits(sign | 0x7f800000u | rest << 13);
    if (exponent == 0) return of_bits(sign | to_bits((float)rest * of_bits(0x33800000u)));
    return of_bits(sign | (exponent + 112) << 23 | rest << 13);
}

static __device__ unsigned short to_f16(float value) {
    unsigned bits = to_bits(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return (unsigned short)(sign | 0x7e00u);
    if (size >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);
    // The sum with a half is rounded where the smallest numbers of 16 bits are apart.
    if (size < 0x38800000u) return (unsigned short)(sign | (to_bits(of_bits(size) + 0.5f) - 0x3f000000u));
    return (unsigned short)(sign | (size + 0xfffu + (size >> 13 & 1u) - 0x38000000u) >> 13);
}

static __device__ unsigned short to_bf16(float value) {
    unsigned bits = to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (unsigned short)(bits >> 16 | 0x40u);
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Types of elements: 0 is f32, 1 f16, 2 bf16.
static __device__ float load(const char *from, number type, number at) {
    if (type == 0) return ((const float *)from)[at];
    unsigned short bits = ((const unsigned short *)from)[at];
    return type == 1 ? from_f16(bits) : of_bits((unsigned)bits << 16);
}

static __device__ void store(char *to, number type, number at, float value) {
    if (type == 0) ((float *)to)[at] = value;
    else ((unsigned short *)to)[at] = type == 1 ? to_f16(value) : to_bf16(value);
}

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
