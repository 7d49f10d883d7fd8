// half and bfloat: 16 bits in memory, every operation in float and rounded once, to nearest even. One rounding of the float result
// is the exact one: 24 bits are more than twice 11, and two.
#pragma once

#include <stdint.h>

namespace metal {

inline uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

// A function that is called: where it stands in every place that converts, kernels are slow to compile and no faster.
#define CALLED __attribute__((noinline)) inline

// A number of EXPONENT and MANTISSA bits, and a sign.
template <int EXPONENT, int MANTISSA>
CALLED uint16_t narrow(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t sign = bits >> 31 << 15;
    const uint32_t size = bits & 0x7fffffffu;
    constexpr uint32_t infinity = ((1u << EXPONENT) - 1) << MANTISSA;
    if (size > 0x7f800000u) {
        return uint16_t(sign | infinity | 1u << (MANTISSA - 1));
    }
    constexpr int bias = (1 << (EXPONENT - 1)) - 1;
    int exponent = int(size >> 23) - 127 + bias;
    uint64_t mantissa = size & 0x7fffffu;
    if (size >> 23 != 0) {
        mantissa |= 0x800000u;
    } else {
        exponent += 1;
    }
    int dropped = 23 - MANTISSA;
    if (exponent <= 0) {
        dropped += 1 - exponent;
        exponent = 1;
    }
    if (dropped > 40) {
        return uint16_t(sign);
    }
    const uint64_t half_unit = uint64_t(1) << (dropped - 1);
    const uint64_t rest = mantissa & ((uint64_t(1) << dropped) - 1);
    uint64_t kept = mantissa >> dropped;
    kept += rest > half_unit || (rest == half_unit && (kept & 1) != 0);
    // The leading bit of a normal number, or a carry into it, is one step of the exponent.
    const uint64_t result = (uint64_t(exponent - 1) << MANTISSA) + kept;
    return uint16_t(sign | (result >= infinity ? infinity : uint32_t(result)));
}

template <int EXPONENT, int MANTISSA>
CALLED float widen(uint16_t narrow) {
    const uint32_t sign = uint32_t(narrow >> 15) << 31;
    const uint32_t exponent = narrow >> MANTISSA & ((1u << EXPONENT) - 1);
    const uint32_t mantissa = narrow & ((1u << MANTISSA) - 1);
    constexpr int bias = (1 << (EXPONENT - 1)) - 1;
    if (exponent == (1u << EXPONENT) - 1) {
        return float_of(sign | 0x7f800000u | mantissa << (23 - MANTISSA));
    }
    if (exponent == 0) {
        // A power of two times a small whole number: exact.
        const float unit = float_of(uint32_t(127 + 1 - bias - MANTISSA > 0 ? 127 + 1 - bias - MANTISSA : 0) << 23);
        if (EXPONENT == 8) {
            return float_of(sign | mantissa << (23 - MANTISSA));
        }
        const float size = unit * float(mantissa);
        return sign ? -size : size;
    }
    return float_of(sign | (exponent + 127 - bias) << 23 | mantissa << (23 - MANTISSA));
}

template <int EXPONENT, int MANTISSA>
struct Narrow {
    uint16_t bits;

    Narrow() = default;
    // From float only by name, as narrowing is in MSL for bfloat; stricter than MSL for half.
    explicit Narrow(float x) : bits(narrow<EXPONENT, MANTISSA>(x)) {}
    operator float() const { return widen<EXPONENT, MANTISSA>(bits); }
    Narrow operator-() const { return Narrow(-float(*this)); }
};

#define EMULATE_OPERATOR(op)                                                                   \
    template <int E, int M>                                                                    \
    inline Narrow<E, M> operator op(Narrow<E, M> x, Narrow<E, M> y) {                          \
        return Narrow<E, M>(float(x) op float(y));                                             \
    }
EMULATE_OPERATOR(+)
EMULATE_OPERATOR(-)
EMULATE_OPERATOR(*)
EMULATE_OPERATOR(/)
#undef EMULATE_OPERATOR
#undef CALLED

}  // namespace metal

typedef metal::Narrow<5, 10> half;
typedef metal::Narrow<8, 7> bfloat;
