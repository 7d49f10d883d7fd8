// Clamps the lengths and the page table of batch entries for cuDNN engines, in one launch. The inputs are unchecked device data: whatever they hold, no
// length exceeds its extent, no page is outside of the container, and pages past the keys of a batch entry refer to page 0.

typedef long long number;

__device__ static number within(number x, number least, number most) { return x < least ? least : x < most ? x : most; }

// One thread per batch entry, and one per page of the table that engines read. The caller's pages are divided into `parts` pages each. Key lengths become
// at least `least`; if that is not 0, batch entries without keys get no queries. If input and output are the same memory, the caller promises that the
// lengths are valid, and they are not written.
extern "C" __global__ void entries(number batch, const int *queries, number most_queries, int *to_queries, const int *keys, number most_keys,
                                   int *to_keys, number least, number each, number parts, number tokens, number pages, const int *table,
                                   number given, int *to) {
    number n = (number)blockIdx.x * blockDim.x + threadIdx.x;
    if (to_queries != queries && n < batch) to_queries[n] = (int)(least && keys[n] < least ? 0 : within(queries[n], 0, most_queries));
    if (to_keys != keys && n < batch) to_keys[n] = (int)within(keys[n], least, most_keys);
    if (n >= batch * each) return;
    number b = n / each, at = n % each;
    number page = !keys || at * tokens < keys[b] ? within(table[b * given + at / parts], 0, pages - 1) : 0;
    to[n] = (int)(page * parts + at % parts);
}
