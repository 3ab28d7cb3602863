// Lesson 17. int4 rows whose codes are multiplied as they lie in the cache, for queries in bfloat16.

#pragma once
#include "code_scores.h"
#include "code_values.h"
#include "int4_rows.h"

#if MULTIPLIES_BYTES
struct Int4Codes {
    uint8_t bits;
};
template <>
constexpr bool CODED<Int4Codes> = true;

template <>
struct Words<Int4Codes> : Layout<Int4Codes> {
    using C = Int4Codes;
    static constexpr int SPAN = 4 * GROUP;  // numbers, in 64 bytes
    static int64_t stride(int dim) { return row_bytes(dim); }
    static void store_weights(float* p, vec weights) { store(p, weights); }

    struct Coding {  // each 16 bytes of a span are a group; one vector has numbers 0, 2, 4, ..., the other 1, 3, 5, ...
        static constexpr int GROUPS = 4, MOST_SPANS = 4;
        static constexpr float OFFSET = 0;
        static int spans(int dim) { return dim / SPAN; }
        static int vectors(int) { return 2; }
        static int number(int span, int v, int byte) { return span * SPAN + 2 * byte + v; }
        static ivec half(ivec bytes, int which) { return (which ? bytes >> 4 : bytes) & 0x0f0f0f0f; }
        static ivec key(const C* row, int span, int v) { return half(load_bytes(row + span * SPAN / 2), v); }
        static const C* halves_of(const C* row, int dim, int span) { return row + code_bytes(dim) + 2 * GROUPS * span; }
        static int leasts_after(int dim) { return 2 * num_groups(dim); }
        static vec by_group(CacheRows<C> row, int dim, int span, int after) {  // of four rows, side by side
            int64_t four[4];
            for (int i = 0; i < 4; i++) memcpy(four + i, halves_of(row[i], dim, span) + after, sizeof *four);
            const __m512i word = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
            const __m256i halves = _mm256_set_epi64x(four[3], four[2], four[1], four[0]);
            return (vec)_mm512_permutexvar_ps(word, _mm512_cvtph_ps(halves));
        }
        static Steps steps(CacheRows<C> row, int dim, int span) {
            return {by_group(row, dim, span, 0), by_group(row, dim, span, leasts_after(dim))};
        }
        static void all_steps(CacheRows<C> row, int dim, int span, float* to) {
            typedef int16_t places __attribute__((vector_size(4 * LANES)));
            const auto eight = [&](int first, int after) {  // rows' halves
                int64_t x[8];
                for (int i = 0; i < 8; i++) memcpy(x + i, halves_of(row[first + i], dim, span) + after, sizeof *x);
                return _mm512_set_epi64(x[7], x[6], x[5], x[4], x[3], x[2], x[1], x[0]);
            };
            for (int after : {0, leasts_after(dim)}) {
                const __m512i a = eight(0, after), b = eight(8, after);
                for (int g = 0; g < GROUPS; g += 2, to += 2 * LANES) {
                    places of_two;
                    for (int j = 0; j < LANES; j++) of_two[j] = 4 * j + g, of_two[LANES + j] = 4 * j + g + 1;
                    const __m512i two = _mm512_permutex2var_epi16(a, (__m512i)of_two, b);
                    store(to, (vec)_mm512_cvtph_ps(_mm512_castsi512_si256(two)));
                    store(to + LANES, (vec)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(two, 1)));
                }
            }
        }
        static ivec weights(const float* four) {  // a group's for its words
            const __m512i word = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
            return (ivec)_mm512_permutexvar_epi32(word, _mm512_castsi128_si512(_mm_load_si128((const __m128i*)four)));
        }
        static void values(CacheRows<C> row, int part, ivec* x) {  // half of a span
            __m512i its[4];
            for (int i = 0; i < 4; i++) its[i] = _mm512_loadu_si512(row[i] + part / 2 * SPAN / 2);
            const bool upper = part % 2;
            const __m512i a = upper ? _mm512_unpackhi_epi8(its[0], its[1]) : _mm512_unpacklo_epi8(its[0], its[1]);
            const __m512i b = upper ? _mm512_unpackhi_epi8(its[2], its[3]) : _mm512_unpacklo_epi8(its[2], its[3]);
            const ivec both[2] = {(ivec)_mm512_unpacklo_epi16(a, b), (ivec)_mm512_unpackhi_epi16(a, b)};
            for (int v = 0; v < 4; v++) x[v] = half(both[v / 2], v % 2);
        }
        // Of a part's 4 vectors, a lane of word w in the group has bytes 8 * (part % 2) + 4 * (v / 2) + w of its 16.
        static int place(int i) {
            const int part = i / 64, v = i / 16 % 4, byte = i % 16 / 4 * 16 + part % 2 * 8 + v / 2 * 4 + i % 4;
            return part / 2 * SPAN + 2 * byte + v % 2;
        }
        static int group(int i) { return i / SPAN * GROUPS + i % 16 / 4; }
    };
};
#endif
