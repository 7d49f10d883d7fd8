// A page table as engines may be given it. It is data that nobody has checked: whatever it holds, no page is outside of the container, and what is
// behind the keys of an entry is the first page of all.

typedef long long number;

// A thread for each entry of the table that engines read: a page of theirs is one of several parts of a page of the caller's.
extern "C" __global__ void pages(number batch, number each, number parts, number tokens, number pages, number longest, const int *lengths,
                                 const int *table, number given, int *to) {
    number n = (number)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= batch * each) return;
    number b = n / each, at = n % each, keys = lengths && lengths[b] < longest ? lengths[b] : longest;
    number page = at * tokens < keys ? table[b * given + at / parts] : 0;
    page = page < 0 ? 0 : page < pages ? page : pages - 1;
    to[n] = (int)(page * parts + at % parts);
}
