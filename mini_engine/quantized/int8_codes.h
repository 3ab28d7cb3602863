// Lesson 17. int8 rows whose codes are multiplied as they lie in the cache, for queries in bfloat16.

#pragma once
#include "code_scores.h"
#include "code_values.h"

INLINE int64_t int8_stride(int dim) { return (dim + 3) / 4 * 4 + 4; }
template <typename C>
INLINE vec int8_scales(CacheRows<C> row, int dim) {  // of LANES rows
    alignas(4 * LANES) float x[LANES];
    for (int j = 0; j < LANES; j++) {
        memcpy(x + j, row[j] + int8_stride(dim) - 4, 4);
        asm("" : "+m"(x[j]));
    }
    return load(x);
}

#if MULTIPLIES_BYTES
struct Int8Codes {
    int8_t value;
};
template <>
constexpr bool CODED<Int8Codes> = true;

template <>
struct Words<Int8Codes> : Layout<Int8Codes> {
    using C = Int8Codes;
    static int64_t stride(int dim) { return int8_stride(dim); }
    static vec scales(CacheRows<C> row, int dim) { return int8_scales(row, dim); }
    static void store_weights(float* p, vec weights) { store(p, weights); }

    struct Coding {  // a row is one span and one group; a key's byte counts 128 more than its integer
        static constexpr int GROUPS = 1, MOST_SPANS = 1;
        static constexpr float OFFSET = -128;
        static int spans(int) { return 1; }
        static int vectors(int dim) { return dim / (4 * LANES); }
        static int number(int, int v, int byte) { return v * 4 * LANES + byte; }
        static ivec key(const C* row, int, int v) { return load_bytes(row + v * 4 * LANES) ^ int32_t(0x80808080); }
        static void all_steps(CacheRows<C> row, int dim, int, float* to) { store(to, scales(row, dim)); }
        static ivec weights(const float* four) { return (ivec)all_lanes(four); }
        static void values(CacheRows<C> row, int part, ivec* x) {
            __m512i its[4];
            for (int i = 0; i < 4; i++) its[i] = _mm512_loadu_si512(row[i] + part * 4 * LANES);
            const __m512i a = _mm512_unpacklo_epi8(its[0], its[1]), b = _mm512_unpackhi_epi8(its[0], its[1]);
            const __m512i c = _mm512_unpacklo_epi8(its[2], its[3]), d = _mm512_unpackhi_epi8(its[2], its[3]);
            x[0] = (ivec)_mm512_unpacklo_epi16(a, c), x[1] = (ivec)_mm512_unpackhi_epi16(a, c);
            x[2] = (ivec)_mm512_unpacklo_epi16(b, d), x[3] = (ivec)_mm512_unpackhi_epi16(b, d);
        }
        // Instructions that interleave do it within 16 bytes: a vector holds 4 numbers of each 16.
        static int place(int i) { return i / 64 * 64 + i % 16 / 4 * 16 + i / 16 % 4 * 4 + i % 4; }
        static int group(int) { return 0; }
    };
};
#endif
