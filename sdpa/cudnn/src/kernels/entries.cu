// What engines are told of batch entries, in one launch. It is made of data that nobody has checked: whatever that holds, no length is past its
// extent, no page is outside of the container, and what is behind the keys of an entry is the first page of all.

typedef long long number;

__device__ static number within(number x, number least, number most) { return x < least ? least : x < most ? x : most; }

// A thread for each entry, and one for each entry of the table that engines read: a page of theirs is one of several parts of a page of the
// caller's. Keys are `least` or more; where that is not none, entries without keys have no queries. Lengths that are read where they would be
// written are promised to be right.
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
