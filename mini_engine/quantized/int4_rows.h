// Lesson 17. int4 rows as processors read them; int4_rows.py has the same layout.
//
// A row is opened once: its numbers, code * step + least, go to the first cache, as T. With 16 levels, no integer is
// nearly as good as what it stands for, and a step for each 32 numbers would have to enter the inner loops.

#pragma once
#include "../attention/vectors.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int GROUP = 32;

INLINE int code_bytes(int dim) { return (dim + 7) / 8 * 4; }
INLINE int num_groups(int dim) { return (dim + GROUP - 1) / GROUP; }
INLINE int row_bytes(int dim) { return code_bytes(dim) + 4 * num_groups(dim); }

INLINE float widen_half(const uint8_t* p) {  // float16, infinities and NaN included
    uint16_t half;
    memcpy(&half, p, sizeof half);
#if defined(__F16C__)
    return _cvtsh_ss(half);
#endif
    uint32_t bits = uint32_t(half & 0x7fff) << 13;
    float x;
    memcpy(&x, &bits, sizeof x);
    x *= 0x1p112f;
    memcpy(&bits, &x, sizeof bits);
    if ((half & 0x7c00) == 0x7c00) bits |= 0x7f800000;
    bits |= uint32_t(half & 0x8000) << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}
INLINE void widen_halves(const uint8_t* p, int count, float* to) {  // an even number of them
    int i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 2 * i))));
    for (; i + 4 <= count; i += 4)
        _mm_storeu_ps(to + i, _mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)(p + 2 * i))));
#endif
    for (; i < count; i++) to[i] = widen_half(p + 2 * i);
}

// ---------------------------------------------------------------- LANES codes, the lower half of a byte first

INLINE vec codes(const uint8_t* p) {
#if defined(__AVX512F__)
    const __m512i pair = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)p));
    const __m512i both = _mm512_or_si512(pair, _mm512_slli_epi64(pair, 28));  // the upper half, 4 bits into the next 32
    return (vec)_mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(15)));
#elif defined(__AVX2__)
    int32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    const __m256i pair = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes));
    const __m256i both = _mm256_or_si256(pair, _mm256_slli_epi64(pair, 28));
    return (vec)_mm256_cvtepi32_ps(_mm256_and_si256(both, _mm256_set1_epi32(15)));
#else
    ivec x;
    for (int j = 0; j < LANES; j++) x[j] = p[j / 2] >> j % 2 * 4 & 15;
    return __builtin_convertvector(x, vec);
#endif
}

// ---------------------------------------------------------------- rows

template <typename T>
INLINE void open_part(const uint8_t* from, float step, float least, int count, T* to) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, codes(from + i / 2) * step + least);
    for (; i < count; i++) narrow(float(from[i / 2] >> i % 2 * 4 & 15) * step + least, to + i);
}
template <typename T>
INLINE void open_pair(const uint8_t* from, const float* step, const float* least, T* to) {  // two whole groups
    open_part(from, step[0], least[0], GROUP, to);
    open_part(from + GROUP / 2, step[1], least[1], GROUP, to + GROUP);
}
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
INLINE void open_pair(const uint8_t* from, const float* step, const float* least, bf16* to) {
    // The 16 numbers that the codes of each group can stand for are a table of 32; then each code chooses from its
    // half.
    const __m512 levels = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512 first = _mm512_fmadd_ps(levels, _mm512_set1_ps(step[0]), _mm512_set1_ps(least[0]));
    const __m512 second = _mm512_fmadd_ps(levels, _mm512_set1_ps(step[1]), _mm512_set1_ps(least[1]));
    const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    const __m512i a = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
    const __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(from + GROUP / 2)));
    const __m512i in_first = _mm512_set1_epi16(15), in_second = _mm512_set1_epi16(16);
    const __m512i at = _mm512_ternarylogic_epi32(a, _mm512_slli_epi32(a, 12), in_first, 0xa8);    // (a | b) & c
    const __m512i bt = _mm512_ternarylogic_epi32(b, _mm512_slli_epi32(b, 12), in_second, 0xfe);  // a | b | c
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(at, table));
    _mm512_storeu_si512(to + GROUP, _mm512_permutexvar_epi16(bt, table));
}
#endif

template <typename T>
INLINE void open_row(const uint8_t* row, int dim, T* to) {
    const uint8_t *step = row + code_bytes(dim), *least = step + 2 * num_groups(dim);
    for (int d = 0; d < dim; d += GROUP, step += 2, least += 2)
        open_part(row + d / 2, widen_half(step), widen_half(least), std::min(GROUP, dim - d), to + d);
}

// Rows of so many groups, all whole, each `width` after the one before: first all their steps, which takes time to
// arrive, then all their codes.
template <int GROUPS, typename T>
INLINE void open_whole(const uint8_t* const* row, int count, T* to, int width) {
    float steps[LANES][2 * GROUPS];
    for (int j = 0; j < count; j++) widen_halves(row[j] + GROUPS * GROUP / 2, 2 * GROUPS, steps[j]);
    for (int j = 0; j < count; j++)
        for (int g = 0; g < GROUPS; g += 2)
            open_pair(row[j] + g * GROUP / 2, steps[j] + g, steps[j] + GROUPS + g, to + j * width + g * GROUP);
}
