// Lesson 3. Vectors of floats for paged_cpu.cpp, in the form that GCC and Clang understand on every processor: 16 lanes
// where there is AVX-512, 8 with AVX, 4 with NEON or SSE. Each operation rounds alike in every place that uses it.

#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, SUMS = 16;  // floats in a vector; sums that fit the registers with room to spare
#elif defined(__AVX__)
constexpr int LANES = 8, SUMS = 8;
#else
constexpr int LANES = 4, SUMS = 8;
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")  // a loop over sums that must stay in registers
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
struct bf16 {
    uint16_t bits;  // the upper half of a float
};

INLINE vec load(const float* p) {
    vec x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store(float* p, vec x) { memcpy(p, &x, sizeof x); }
INLINE uvec rounded(vec x) {  // bfloat16 in the upper halves: to nearest, ties to even; NaN stays NaN
    const uvec bits = (uvec)x;
    return x != x ? uvec{} + 0x7fc00000 : (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
}
INLINE void store(bf16* p, vec x) {
    const halves upper = __builtin_convertvector(rounded(x) >> 16, halves);
    memcpy(p, &upper, sizeof upper);
}

// A load of 4 * LANES bytes gives 4 / sizeof(T) vectors: one of float, or two of bfloat16, its even and odd elements.
template <typename T>
constexpr int PER_LOAD = 4 / sizeof(T);
INLINE void load_split(const float* p, vec* x) { x[0] = load(p); }
INLINE void load_split(const bf16* p, vec* x) {
    ivec pairs;
    memcpy(&pairs, p, sizeof pairs);
    x[0] = (vec)(pairs << 16);
    x[1] = (vec)(pairs & int32_t(0xffff0000));
}
INLINE void store_joined(float* p, const vec* x) { store(p, x[0]); }  // what load_split would load as x
INLINE void store_joined(bf16* p, const vec* x) {
    const uvec pairs = rounded(x[0]) >> 16 | rounded(x[1]);
    memcpy(p, &pairs, sizeof pairs);
}
INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }  // into the second cache: the first is too small
INLINE void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1); }

INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
INLINE void narrow(float x, float* p) { *p = x; }
INLINE void narrow(float x, bf16* p) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    p->bits = x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// ---------------------------------------------------------------- pairs of bfloat16

#if defined(__AVX512BF16__)
INLINE vec add_pairs(vec sum, ivec a, ivec b) {  // sum + both products of each lane's pair
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#else
INLINE vec add_pairs(vec sum, ivec a, ivec b) {
    const int32_t odd = 0xffff0000;
    sum += (vec)(a << 16) * (vec)(b << 16);
    return sum + (vec)(a & odd) * (vec)(b & odd);
}
#endif

// ---------------------------------------------------------------- moving lanes

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, ivec{__VA_ARGS__})
#endif
using Lanes = std::make_integer_sequence<int, LANES>;

template <int BY, int... I>
INLINE vec rotate(vec x, std::integer_sequence<int, I...>) {
    return SHUFFLE(x, x, ((I + BY) % LANES)...);
}
template <int N = LANES / 2, typename F>
INLINE vec fold_lanes(vec x, F f) {  // f over all lanes; every lane holds the result
    x = f(x, rotate<N>(x, Lanes{}));
    if constexpr (N > 1) x = fold_lanes<N / 2>(x, f);
    return x;
}
INLINE vec larger(vec a, vec b) { return a > b ? a : b; }
INLINE vec plus(vec a, vec b) { return a + b; }

template <int FROM, int... I>
INLINE vec interleave(vec a, vec b, std::integer_sequence<int, I...>) {  // half the lanes of a and of b, in turn
    return SHUFFLE(a, b, (FROM + I / 2 + (I % 2) * LANES)...);
}
template <int N = LANES>
INLINE vec sum_each(vec* x) {  // lane j = the sum of x[j]: a transposition, added up on the way
    for (int i = 0; i < N / 2; i++)
        x[i] = interleave<0>(x[i], x[i + N / 2], Lanes{}) + interleave<LANES / 2>(x[i], x[i + N / 2], Lanes{});
    if constexpr (N > 2) return sum_each<N / 2>(x);
    return x[0];
}
INLINE void transpose(vec* x) {  // lane j of x[i] and lane i of x[j] change places
    for (int n = 1; n < LANES; n *= 2) {
        vec y[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = interleave<0>(x[i], x[i + LANES / 2], Lanes{});
            y[2 * i + 1] = interleave<LANES / 2>(x[i], x[i + LANES / 2], Lanes{});
        }
        for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
}

// ---------------------------------------------------------------- 2 to the power of x

INLINE vec exp2(vec x) {  // for x <= 0; exact at 0, zero below -126, NaN stays NaN
    const float magic = 12582912.f;  // 1.5 * 2^23: adding it drops the fraction
    const vec whole = (x + magic) - magic, part = (x - whole) * 0.693147180559945f;
    vec y = vec{} + 1.f / 5040;
    for (float c : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f}) y = y * part + c;  // Taylor's e^part
    const ivec exponent = __builtin_convertvector(larger(whole, vec{} - 126.f), ivec) + 127;
    return x < vec{} - 126.f ? vec{} : y * (vec)(exponent << 23);
}
