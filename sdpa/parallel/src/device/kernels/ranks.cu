// Moves, merges and sums rows in the memory of one rank. Every parameter has 64 bits; floats are passed as their bits.
#include "elements.cuh"

enum {
    // Types from here on are elements of (type - RAW) bytes, which are copied as they are.
    RAW = 16,
    // Neighbours of the last axis that one thread handles.
    RUN = 8
};

static __device__ number thread() { return (number)blockIdx.x * blockDim.x + threadIdx.x; }

static __device__ void copy_raw(const char *from, number at, char *to, number there, number bytes) {
    if (bytes == 1) to[there] = from[at];
    else if (bytes == 2) ((unsigned short *)to)[there] = ((const unsigned short *)from)[at];
    else if (bytes == 4) ((unsigned *)to)[there] = ((const unsigned *)from)[at];
    else ((number *)to)[there] = ((const number *)from)[at];
}

// Copies a tensor with four axes (`mode` 0), adds it to floats (1), or copies 64-bit integers and adds `more` (2).
extern "C" __global__ void __launch_bounds__(256) move_elements(
    number n0, number n1, number n2, number n3, const char *from, number from_type, number from0, number from1, number from2, number from3, char *to,
    number to_type, number to0, number to1, number to2, number to3, number mode, number more) {
    number runs = (n3 + RUN - 1) / RUN, row = thread() / runs, first = (thread() - row * runs) * RUN;
    if (row >= n0 * n1 * n2) return;
    number i2 = row % n2, i1 = row / n2 % n1, i0 = row / n2 / n1;
    number source = i0 * from0 + i1 * from1 + i2 * from2, target = i0 * to0 + i1 * to1 + i2 * to2;
    for (number d = first; d < n3 && d < first + RUN; d++) {
        number at = source + d * from3, there = target + d * to3;
        if (mode == 2) ((number *)to)[there] = ((const number *)from)[at] + more;
        else if (mode == 1) store(to, to_type, there, load(to, to_type, there) + load(from, from_type, at));
        else if (from_type >= RAW) copy_raw(from, at, to, there, from_type - RAW);
        else store(to, to_type, there, load(from, from_type, at));
    }
}

struct Merged {
    float max, sum, weight, other;
    bool keeps;
};

// Merges two outputs of a row: `w = sum * e^(max - larger max)` weights each. A row without keys has a maximum of -infinity and a sum of 0; two such rows
// keep the first output.
static __device__ Merged merged(float max, float sum, float other_max, float other_sum) {
    Merged made;
    // fmaxf would hide a NaN.
    made.max = max != max || other_max != other_max ? max + other_max : max > other_max ? max : other_max;
    made.keeps = made.max == none();
    float a = made.keeps ? 1.0f : sum * expf(max - made.max), b = made.keeps ? 0.0f : other_sum * expf(other_max - made.max);
    made.sum = made.keeps ? 0.0f : a + b;
    made.weight = made.keeps ? 1.0f : a / made.sum;
    made.other = made.keeps ? 0.0f : b / made.sum;
    return made;
}

// Merges a partial output, dense in (batch, head, seq, dim), into an accumulator of floats. `row_maxima` and `row_sums` of the accumulator are those before
// this merge: `merge_statistics` runs next.
extern "C" __global__ void __launch_bounds__(256) merge_outputs(
    number batch, number heads, number seq, number dim, const char *o, number type, const float *row_max, const float *sum_exp, float *to, number to_b,
    number to_h, number to_s, const float *row_maxima, const float *row_sums, number at_b, number at_h, number at_s) {
    number runs = (dim + RUN - 1) / RUN, row = thread() / runs, first = (thread() - row * runs) * RUN;
    if (row >= batch * heads * seq) return;
    number s = row % seq, h = row / seq % heads, b = row / seq / heads, at = b * at_b + h * at_h + s * at_s;
    Merged weights = merged(row_maxima[at], row_sums[at], row_max[row], sum_exp[row]);
    float *target = to + b * to_b + h * to_h + s * to_s;
    for (number d = first; d < dim && d < first + RUN; d++)
        if (!weights.keeps) target[d] = weights.weight * target[d] + weights.other * load(o, type, row * dim + d);
}

// Merges the statistics of a partial output, dense in (batch, head, seq), into those of the accumulator.
extern "C" __global__ void __launch_bounds__(256) merge_statistics(
    number batch, number heads, number seq, const float *row_max, const float *sum_exp, float *row_maxima, float *row_sums, number at_b, number at_h,
    number at_s) {
    number row = thread();
    if (row >= batch * heads * seq) return;
    number at = row / seq / heads * at_b + row / seq % heads * at_h + row % seq * at_s;
    Merged both = merged(row_maxima[at], row_sums[at], row_max[row], sum_exp[row]);
    row_maxima[at] = both.max;
    row_sums[at] = both.sum;
}

// Writes a merged output with the sink of its head, if there is one, and those statistics whose address is not 0. `base` is the factor of `stats`.
extern "C" __global__ void __launch_bounds__(256) finish_rows(
    number batch, number heads, number seq, number dim, const float *from, number from_b, number from_h, number from_s, const float *row_maxima,
    const float *row_sums, number at_b, number at_h, number at_s, const char *sinks, number sink_type, number first_head, number base, char *o,
    number type, number o_b, number o_h, number o_s, float *stats, float *row_max, float *sum_exp, number to_b, number to_h, number to_s) {
    number runs = (dim + RUN - 1) / RUN, row = thread() / runs, first = (thread() - row * runs) * RUN;
    if (row >= batch * heads * seq) return;
    number s = row % seq, h = row / seq % heads, b = row / seq / heads, at = b * at_b + h * at_h + s * at_s;
    Merged whole = {row_maxima[at], row_sums[at], 1.0f, 0.0f, true};
    if (sinks) whole = merged(whole.max, whole.sum, load(sinks, sink_type, first_head + h), 1.0f);
    const float *source = from + b * from_b + h * from_h + s * from_s;
    number target = b * o_b + h * o_h + s * o_s;
    for (number d = first; d < dim && d < first + RUN; d++)
        store(o, type, target + d, whole.keeps ? source[d] : whole.weight * source[d]);
    if (first) return;
    number there = b * to_b + h * to_h + s * to_s;
    if (stats) stats[there] = (whole.max + logf(whole.sum)) * of_bits((unsigned)base);
    if (row_max) row_max[there] = whole.max;
    if (sum_exp) sum_exp[there] = whole.sum;
}

// Computes the part of each thread in the gradient of its head's sink: -e^(sink - stats) * (o * d_o), summed over every `parts`th row.
extern "C" __global__ void __launch_bounds__(256) sink_parts(
    number batch, number heads, number seq, number dim, const char *o, number o_b, number o_h, number o_s, const char *d_o, number d_o_b, number d_o_h,
    number d_o_s, number type, const float *stats, number at_b, number at_h, number at_s, const char *sinks, number sink_type, number parts, float *to) {
    number head = thread() / parts, part = thread() % parts;
    if (head >= heads) return;
    float sink = load(sinks, sink_type, head);
    double total = 0.0;
    for (number row = part; row < batch * seq; row += parts) {
        number b = row / seq, s = row % seq;
        float stat = stats[b * at_b + head * at_h + s * at_s];
        // A row without keys and with a sink of -infinity has no weights.
        if (stat == none()) continue;
        number own = b * o_b + head * o_h + s * o_s, other = b * d_o_b + head * d_o_h + s * d_o_s;
        double product = 0.0;
        for (number d = 0; d < dim; d++) product += (double)load(o, type, own + d) * (double)load(d_o, type, other + d);
        total -= (double)expf(sink - stat) * product;
    }
    to[head * parts + part] = (float)total;
}

// Sums the parts of each head, in their order. One thread per head.
extern "C" __global__ void __launch_bounds__(256) sink_sums(number heads, number parts, const float *from, float *to) {
    number head = thread();
    if (head >= heads) return;
    double total = 0.0;
    for (number part = 0; part < parts; part++) total += from[head * parts + part];
    to[head] = (float)total;
}

// Finds the sequence and the position of each token by the offsets of `count` sequences, which do not decrease. Tokens of no sequence have -1 among queries
// and -2 among keys, so that they attend to nothing. Results whose address is 0 are not written.
extern "C" __global__ void __launch_bounds__(256) token_sequences(
    number count, number wide, const char *offsets, number tokens, int *sequences_q, int *sequences_k, int *positions_q, int *positions_k) {
    number token = thread();
    if (token >= tokens) return;
    // The last sequence that begins at or before the token is in [low, high).
    number low = -1, high = count;
    while (high - low > 1) {
        number middle = (low + high) / 2;
        if ((wide ? ((const number *)offsets)[middle] : ((const int *)offsets)[middle]) <= token) low = middle;
        else high = middle;
    }
    number first = 0;
    bool found = low >= 0;
    if (found) {
        first = wide ? ((const number *)offsets)[low] : ((const int *)offsets)[low];
        found = (wide ? ((const number *)offsets)[low + 1] : ((const int *)offsets)[low + 1]) > token;
    }
    int position = found ? (int)(token - first) : 0;
    if (sequences_q) sequences_q[token] = found ? (int)low : -1;
    if (sequences_k) sequences_k[token] = found ? (int)low : -2;
    if (positions_q) positions_q[token] = position;
    if (positions_k) positions_k[token] = position;
}
