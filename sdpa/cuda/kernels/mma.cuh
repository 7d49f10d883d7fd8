// The matrix units as single warps have them, and copies to shared memory that threads ask for, from compute capability 8.0 on.

// Four matrices of 8 by 8 halves, transposed: every eighth of the warp tells where the rows of one lie. A thread has two neighbours of a column.
inline void ldmatrix_x4_trans(uint (&x)[4], uint at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

// Adds a product of 16 rows and 8 columns over 16 terms.
inline void mma_m16n8k16(Half, float (&d)[4], const uint (&a)[4], uint b0, uint b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

inline void mma_m16n8k16(BFloat, float (&d)[4], const uint (&a)[4], uint b0, uint b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A number of 11 digits, of the 24 that f32 has.
inline uint cvt_rna_tf32(float x) {
    uint y;
    asm volatile("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

inline void mma_m16n8k8_tf32(float (&d)[4], const uint (&a)[4], const uint (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Adds a product of 16 rows and 8 columns over 8 terms, each number the sum of two of 11 digits: what is left out is the product of the lower parts.
inline void mma_m16n8k8_3xtf32(float (&d)[4], const uint (&a)[4], const uint (&a_low)[4], const uint (&b)[2], const uint (&b_low)[2]) {
    mma_m16n8k8_tf32(d, a_low, b);
    mma_m16n8k8_tf32(d, a, b_low);
    mma_m16n8k8_tf32(d, a, b);
}

inline void st_shared_v4_b32(uint at, uint x, uint y, uint z, uint w) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// Brings 16 bytes to shared memory, from and to multiples of 16: so many of memory, zeros behind. It is there for this thread once its group was waited for.
inline void cp_async_16(uint to, const void* from, uint bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// What this thread asked for so far is a group.
inline void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// At most this many groups are under way.
template <int groups>
inline void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}
