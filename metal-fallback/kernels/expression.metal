// Functions of traced expressions that MSL does not have, or has with another meaning at the edges.

inline int whole_add(int x, int y) {
    return as_type<int>(as_type<uint>(x) + as_type<uint>(y));
}

inline int whole_sub(int x, int y) {
    return as_type<int>(as_type<uint>(x) - as_type<uint>(y));
}

inline int whole_mul(int x, int y) {
    return as_type<int>(as_type<uint>(x) * as_type<uint>(y));
}

inline int whole_neg(int x) {
    return as_type<int>(0u - as_type<uint>(x));
}

inline int whole_abs(int x) {
    return x < 0 ? whole_neg(x) : x;
}

// Toward zero; 0 of a division by 0.
inline int whole_div(int x, int y) {
    return y == 0 ? 0 : y == -1 ? whole_neg(x) : x / y;
}

// With the sign of the first.
inline int whole_mod(int x, int y) {
    return y == 0 || y == -1 ? 0 : x % y;
}

// Toward zero; the nearest of what is too large, 0 of what is not a number.
inline int to_whole(float x) {
    const uint bits = as_type<uint>(x) & 0x7fffffffu;
    if (bits > 0x7f800000u) {
        return 0;
    }
    if (bits >= 0x4f000000u) {
        return x < 0.0f ? as_type<int>(0x80000000u) : 0x7fffffff;
    }
    return int(x);
}

// 1 - tanh(x)^2, of which the difference has no digit left at 9.
inline float tanh_slope(float x) {
    const float e = precise::exp(-2.0f * abs(x));
    const float sum = 1.0f + e;
    return 4.0f * e / (sum * sum);
}

// A series without cancellation: erf x = 2/sqrt(pi) e^(-x^2) x (1 + 2x^2/3 (1 + 2x^2/5 (...))).
inline float error_function(float x) {
    const float size = abs(x);
    if (size > 3.9f) {
        return x < 0.0f ? -1.0f : 1.0f;
    }
    const float square = x * x;
    float sum = 1.0f;
    for (int n = 50; n > 0; n--) {
        sum = 1.0f + sum * (2.0f * square / float(2 * n + 1));
    }
    return 1.12837916709551257390f * precise::exp(-square) * x * sum;
}
