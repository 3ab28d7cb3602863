// Lesson 17. Products of codes, where a processor multiplies bytes and adds the products in fours (AVX-512 VNNI).
//
// Nothing is widened. A query's numbers and a tile's weights become whole numbers of 16 bits, high * 256 + low, and
// meet the codes as they lie in the cache; steps, leasts and scales are applied to the sums:
//
//   score of a key   = sum over its groups of  step * (q . codes) + least * (sum of q)
//   value in the sum = (weight * step) * codes + weight * least
//
// So each number keeps 16 bits below the largest of its query, or of its tile's weights; a bfloat16 has 8. Sums of
// whole numbers are exact, and those of floats go in tile.h's order.
//
// code_scores.h and code_values.h have the loops. How codes lie in a row is said by its cache's `Coding`:
//
//   spans, vectors      parts of a row whose words belong to the same groups, and vectors of codes in each
//   GROUPS              of a span, each with a step (and a least, if there are several)
//   number              which number of a row is a vector's byte
//   key                 one vector of a row's codes as unsigned bytes
//   steps               what restores a span of four rows: in a group's quarter, a word for each row
//   all_steps           16 rows' steps of each group, then their leasts
//   OFFSET              with one group, what an unsigned byte lacks to its code
//   values, weights     four rows' codes side by side, word by word; the weights that they meet there
//   place, group        which number of a row is summed in a lane, and its group

#pragma once
#include "../attention/tile.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define MULTIPLIES_BYTES 1
#else
#define MULTIPLIES_BYTES 0
#endif

template <typename T>
static float largest_size(const T* x, int count) {  // among the bits: in their order, NaN comes after infinity
    int32_t largest = 0, bits;
    for (int i = 0; i < count; i++) {
        const float size = std::fabs(widen(x[i]));
        memcpy(&bits, &size, sizeof bits);
        largest = std::max(largest, bits);
    }
    float size;
    memcpy(&size, &largest, sizeof size);
    return size;
}

#if MULTIPLIES_BYTES
#include <immintrin.h>

constexpr float QUERY_LEVELS = 127 * 256 + 127, WEIGHT_LEVELS = 255 * 256 + 255;
constexpr float LEAST_TOP = 1e-30f;  // what is below in a whole query or tile counts as zero

INLINE ivec add_fours(ivec sum, ivec unsigned_bytes, ivec bytes) {
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)bytes);
}
INLINE vec multiply_add(vec a, vec b, vec c) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vec as_floats(ivec high, ivec low) { return __builtin_convertvector((high << 8) + low, vec); }
INLINE ivec load_bytes(const void* p) {
    ivec x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE float top_of(vec x) {  // the largest lane, or NaN if there is one
    return _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q) ? NAN : fold_lanes(x, larger)[0];
}
// A row is loaded in `count` vectors; with each, a line of the row that comes next is prefetched.
template <typename C>
INLINE void prefetch_line(const C* row, int64_t size, int i, int count) {
    if (64 * i < size) prefetch(row + 64 * i);
    if (i + 1 == count && 64 * count < size) prefetch(row + size - 1);
}
struct Steps {
    vec step, least;
};

// ---------------------------------------------------------------- sums of a vector's quarters, four words each

INLINE ivec sum_quarters(const ivec* x) {  // of 4 vectors: word i of a quarter is the sum of x[i]'s there
    const __m512i *y = (const __m512i*)x;
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(y[0], y[1]), _mm512_unpackhi_epi32(y[0], y[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(y[2], y[3]), _mm512_unpackhi_epi32(y[2], y[3]));
    return (ivec)_mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}
INLINE vec sum_fours(vec x) {  // every word of a quarter becomes their sum
    const __m512 y = _mm512_add_ps((__m512)x, _mm512_permute_ps((__m512)x, 0xb1));
    return (vec)_mm512_add_ps(y, _mm512_permute_ps(y, 0x4e));
}
INLINE vec join_quarters(const vec* x) {  // quarter i is the sum of x[i]'s quarters
    const __m512 *y = (const __m512*)x;
    const __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(y[0], y[1], 0x44), _mm512_shuffle_f32x4(y[0], y[1], 0xee));
    const __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(y[2], y[3], 0x44), _mm512_shuffle_f32x4(y[2], y[3], 0xee));
    return (vec)_mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
#endif
