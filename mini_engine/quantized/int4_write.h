// Lesson 17. How int4 rows are written: a vector is rotated, and each group of 32 becomes codes, a step and a least.
//
// The rotation is a fast Hadamard transform: log2(n) rounds of sums and differences take the place of a product with
// the matrix. What is written of a rotated vector is what int4_rows.py's pack gives, to the bit.

#pragma once
#include "../attention/paged_cpu.h"
#include "int4_rows.h"

#include <cfloat>

INLINE uint16_t narrow_half(float x) {  // float16: to nearest, ties to even
#if defined(__F16C__)
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#endif
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits >= 0x477ff000) return sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00);  // NaN; beyond the largest half
    if (bits >= 0x38800000) return sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
    const float small = std::fabs(x) + 0.5f;  // whose last bit is worth 2^-24, the least half
    memcpy(&bits, &small, sizeof bits);
    return sign | (bits - 0x3f000000);
}

// ---------------------------------------------------------------- rotation

template <int BY, int... I>
INLINE vec partners(vec x, std::integer_sequence<int, I...>) {  // lane i holds what lane i ^ BY held
    return SHUFFLE(x, x, (I ^ BY)...);
}
template <int BY = LANES / 2>
INLINE vec rotate_lanes(vec x, int most) {  // the rounds within a vector, those of at most `most` lanes
    if (BY < most) {
        vec sign;
        for (int j = 0; j < LANES; j++) sign[j] = j & BY ? -1.f : 1.f;
        x = partners<BY>(x, Lanes{}) + x * sign;
    }
    if constexpr (BY > 1) x = rotate_lanes<BY / 2>(x, most);
    return x;
}

// Rotate each run of as many numbers as the largest power of two that divides dim, as rotation.py does.
static NOINLINE void rotate_floats(float* x, int dim) {
    const int n = dim & -dim;
    const float length = 1 / std::sqrt(float(n));
    const bool whole = dim % LANES == 0;
    for (int by = n / 2; by >= (whole ? LANES : 1); by /= 2)
        for (int i = 0; i < dim; i += 2 * by)
            for (int j = i; j < i + by; j++) {
                const float a = x[j], b = x[j + by];
                x[j] = a + b, x[j + by] = a - b;
            }
    for (int i = 0; i < dim && whole; i += LANES) store(x + i, rotate_lanes(load(x + i), n));
    for (int i = 0; i < dim; i++) x[i] *= length;
}
template <typename T>
static void rotate_vector(const T* from, int dim, float* to) {
    for (int d = 0; d < dim; d++) to[d] = widen(from[d]);
    rotate_floats(to, dim);
}
template <typename T>
static void rotate_rows(const T* from, int64_t stride, T* to, int64_t to_stride, const AttentionSizes& n, int threads) {
#pragma omp parallel num_threads(threads) if (n.num_rows > 8)
    {
        std::vector<float> turned(n.dim);
#pragma omp for
        for (int64_t i = 0; i < n.num_rows * n.heads; i++) {
            const int64_t row = i / n.heads, at = i % n.heads * n.dim;
            rotate_vector(from + row * stride + at, int(n.dim), turned.data());
            for (int d = 0; d < n.dim; d++) narrow(turned[d], to + row * to_stride + at + d);
        }
    }
}

// ---------------------------------------------------------------- rows

INLINE vec smaller(vec a, vec b) { return a < b ? a : b; }

static void write_group(const float* x, uint8_t* to, uint16_t* step, uint16_t* least) {  // 32 numbers
    vec low = load(x), high = low;
    bool is_nan = false;
    for (int i = 0; i < GROUP; i++) is_nan |= x[i] != x[i];
    for (int i = 0; i < GROUP; i += LANES) low = smaller(low, load(x + i)), high = larger(high, load(x + i));
    const float from = is_nan ? NAN : fold_lanes(low, smaller)[0], up_to = is_nan ? NAN : fold_lanes(high, larger)[0];
    *step = narrow_half((up_to - from) / 15), *least = narrow_half(from);
    const float width = widen_half((const uint8_t*)step), start = widen_half((const uint8_t*)least);
    const float divisor = width < FLT_MIN ? FLT_MIN : width;
    int32_t codes[GROUP];
    for (int i = 0; i < GROUP; i++) {
        const float code = (x[i] - start) / divisor;
        const float rounded = (code > 0 ? code < 15 ? code : 15 : 0) + 8388608.f;  // 2^23: it is in the lowest bits
        memcpy(codes + i, &rounded, sizeof rounded);
    }
    for (int i = 0; i < GROUP / 2; i++) to[i] = uint8_t((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
}

static NOINLINE void write_row(const float* x, int dim, uint8_t* row) {
    const int groups = num_groups(dim), bytes = code_bytes(dim);
    uint16_t step, least;
    for (int g = 0; g < groups; g++) {
        const int count = std::min(GROUP, dim - g * GROUP);
        float group[GROUP];
        uint8_t codes[GROUP / 2];
        std::fill(std::copy_n(x + g * GROUP, count, group), group + GROUP, x[dim - 1]);
        write_group(group, codes, &step, &least);
        for (int i = count; i < GROUP; i++) codes[i / 2] &= i % 2 ? 15 : 0;
        memcpy(row + g * GROUP / 2, codes, std::min(GROUP / 2, bytes - g * GROUP / 2));
        memcpy(row + bytes + 2 * g, &step, 2), memcpy(row + bytes + 2 * (groups + g), &least, 2);
    }
}
