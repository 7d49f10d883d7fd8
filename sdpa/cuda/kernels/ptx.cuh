// PTX wrappers for conversions, approximate functions, shared memory, named barriers and setmaxnreg. Every kernel source includes this file; the CPU
// emulation replaces it.

inline float cvt_f32_f16(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// Converts two f32 and packs them, `low` into bits 0 to 15.
inline uint cvt_rn_f16x2(float low, float high) {
    uint both;
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

inline uint cvt_rn_bf16x2(float low, float high) {
    uint both;
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

inline float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

inline float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Relative error 2^-22 outside of [1/2, 2]; inside, absolute error 2^-22.
inline float lg2_approx(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

inline float sqrt_approx(float x) {
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// At most 2 ulp off.
inline float div_full(float x, float y) {
    float z;
    asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

// Absolute error 5e-7 for arguments in [-pi, pi].
inline float sin_approx(float x) {
    float y;
    asm("sin.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

inline float cos_approx(float x) {
    float y;
    asm("cos.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// MUFU.TANH: relative error 2^-11.
inline float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

inline uint shared_address(const void* at) {
    return uint(__cvta_generic_to_shared(at));
}

inline void st_shared(uint at, uint x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

inline void st_shared_v4_f32(uint at, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements. Of each matrix a thread holds two elements: row lane / 4, columns 2 (lane % 4) and 2 (lane % 4) + 1.
// Lane n passes the address of row n % 8 of matrix n / 8.
inline void stmatrix_x4(uint at, uint a, uint b, uint c, uint d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

inline uint ld_shared(uint at) {
    uint x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}

// Loads four 8 x 8 matrices of 16-bit elements. Lane n passes the address of row n % 8 of matrix n / 8.
inline void ldmatrix_x4(uint (&x)[4], uint at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

inline float4 ld_shared_v4_f32(uint at) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at) : "memory");
    return x;
}

inline float2 ld_shared_v2_f32(uint at) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at));
    return x;
}

// bar.sync: waits until `threads` threads have arrived at this named barrier.
inline void named_barrier_sync(uint barrier, uint threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// bar.arrive: arrives without waiting.
inline void named_barrier_arrive(uint barrier, uint threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Adds to four consecutive f32: four separate relaxed atomic additions, in no defined order.
inline void red_add_v4_f32(float* to, float x, float y, float z, float w) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// Adds to a 64-bit integer by a relaxed atomic addition.
inline void red_add_u64(ulong64* to, ulong64 x) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}

// Adds to a counter in global memory. The release orders the addition after this thread's own writes; the proxy fence orders it after this thread's
// completed bulk copies.
inline void counter_release_add(int* at, int count) {
    asm volatile(
        "fence.proxy.async.global;\n"
        "red.release.gpu.global.add.s32 [%0], %1;" ::"l"(at),
        "r"(count)
        : "memory");
}

// Spins until the counter has reached `count`. Writes from before the additions to the counter are then visible to this thread (acquire) and to the
// bulk copies that it issues (proxy fence).
inline void counter_acquire_wait(const int* at, int count) {
    int found;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(at) : "memory");
    } while (found < count);
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Hides the address from the compiler, so that it keeps one base register and uses immediate offsets.
inline float* opaque_address(float* at) {
    asm volatile("" : "+l"(at));
    return at;
}

// Hides the value from the compiler, so that the compiler recomputes what depends on the value instead of keeping it in registers.
inline int opaque_int(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Sets the number of registers of each thread of the warpgroup.
template <int count>
inline void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

template <int count>
inline void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
