// What single threads and warps ask the hardware for: conversions, approximate functions, shared memory, barriers with a number, registers.

inline float cvt_f32_f16(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// Two numbers, rounded, the first in the low half.
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

// Off by 2^-22 of the result, between 1/2 and 2 of 1.
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

// Off by two last digits.
inline float div_full(float x, float y) {
    float z;
    asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

// From -pi to pi off by 5e-7 of 1.
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

// Off by 1/2,048 of the result.
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

// Stores four matrices of 8 by 8, of which a thread has two numbers each: row lane / 4, columns 2 (lane % 4) and the next. Lane n tells where row n % 8 of
// matrix n / 8 is.
inline void stmatrix_x4(uint at, uint a, uint b, uint c, uint d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

inline uint ld_shared(uint at) {
    uint x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}

// Four matrices of 8 by 8 halves, by their rows: every eighth of the warp tells where the rows of one lie. A thread has two neighbours of a row.
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

// Waits until so many threads have come to the barrier of this number.
inline void named_barrier_sync(uint barrier, uint threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Comes to it, and waits for nobody.
inline void named_barrier_arrive(uint barrier, uint threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Adds to four numbers in a row, each by itself.
inline void red_add_v4_f32(float* to, float x, float y, float z, float w) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// Counts up, behind everything that this thread has seen or done: by threads, and by the copy engine for them.
inline void counter_release_add(int* at, int count) {
    asm volatile(
        "fence.proxy.async.global;\n"
        "red.release.gpu.global.add.s32 [%0], %1;" ::"l"(at),
        "r"(count)
        : "memory");
}

// Waits until so many are counted: what was done before is there for this thread, and for the copy engine that it asks.
inline void counter_acquire_wait(const int* at, int count) {
    int found;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(at) : "memory");
    } while (found < count);
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// An address that the compiler keeps as it is: what is added to it later is a distance, not made anew.
inline float* opaque_address(float* at) {
    asm volatile("" : "+l"(at));
    return at;
}

// A number of which the compiler forgets what it knew: what follows from it is made anew.
inline int opaque_int(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// From here on the threads of a group have so many registers.
template <int count>
inline void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

template <int count>
inline void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
