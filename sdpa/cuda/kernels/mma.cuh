// mma.sync, ldmatrix.trans and cp.async PTX wrappers of the sm_80 kernels. The CPU emulation replaces this file.

// Like ldmatrix_x4, but transposes each matrix: a thread gets two adjacent elements of a column.
inline void ldmatrix_x4_trans(uint (&x)[4], uint at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

// d += a b, m16n8k16.
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

// Rounds to TF32, which has 11 significant bits of the 24 of f32.
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

// d += a b, m16n8k8 in 3xTF32: each f32 is the sum of two TF32 numbers, and only the product of the low parts is left out.
inline void mma_m16n8k8_3xtf32(float (&d)[4], const uint (&a)[4], const uint (&a_low)[4], const uint (&b)[2], const uint (&b_low)[2]) {
    mma_m16n8k8_tf32(d, a_low, b);
    mma_m16n8k8_tf32(d, a, b_low);
    mma_m16n8k8_tf32(d, a, b);
}

inline void st_shared_v4_b32(uint at, uint x, uint y, uint z, uint w) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// Copies `bytes` bytes to shared memory and fills the rest of 16 bytes with zeros. Both addresses are multiples of 16.
inline void cp_async_16(uint to, const void* from, uint bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Closes the cp.async group of this thread's copies so far.
inline void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `groups` cp.async groups are in flight.
template <int groups>
inline void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}
