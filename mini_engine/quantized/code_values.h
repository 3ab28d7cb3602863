// Lesson 17. Sums of values that are codes (codes.h): the same as tile.h's add_values.

#pragma once
#include "codes.h"

#if MULTIPLIES_BYTES

enum { HIGH = 0, LOW = LANES, SCALE = 2 * LANES, WEIGHT_WORDS = 3 * LANES };  // a row's weights in a tile, for a span

template <typename C>
struct CodeValues {
    using Coding = typename Words<C>::Coding;
    static constexpr int GROUPS = Coding::GROUPS;
    static constexpr bool HAS_LEASTS = GROUPS > 1;

    // Sums of weight * least, for each group and spread over the lanes, follow the values of a row's record.
    static int least_sums(int dim) { return HAS_LEASTS ? Coding::spans(dim) * GROUPS * LANES : 0; }
    static int weight_words(int dim) { return Coding::spans(dim) * WEIGHT_WORDS; }

    // Weights times steps as bytes: a word holds a group's for four keys, 4 words are four keys' for all groups.
    INLINE void weigh(vec weights, const float* steps, int dim, float* least_sums, float* to) {
        for (int span = 0; span < Coding::spans(dim); span++, to += WEIGHT_WORDS, steps += 2 * GROUPS * LANES) {
            vec product[4], most = {};
            for (int g = 0; g < GROUPS; g++) product[g] = weights * load(steps + g * LANES);
            for (int g = GROUPS; g < 4; g++) product[g] = product[0];
            for (int g = 0; g < GROUPS; g++) most = product[g] < most ? most : product[g];
            const float top = top_of(most), factor = top < LEAST_TOP ? 0 : WEIGHT_LEVELS / top;
            __m512i n[4];
            for (int g = 0; g < 4; g++) n[g] = _mm512_cvtps_epi32((__m512)(product[g] * factor));
            const __m512i a = _mm512_packus_epi32(n[0], n[1]), b = _mm512_packus_epi32(n[2], n[3]);
            const __m512i byte = _mm512_set1_epi16(255);
            store(to + HIGH, (vec)_mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)));
            store(to + LOW, (vec)_mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte)));
            store(to + SCALE, vec{} + top / WEIGHT_LEVELS);
            for (int g = 0; g < GROUPS && HAS_LEASTS; g++, least_sums += LANES)
                store(least_sums, multiply_add(weights, load(steps + (GROUPS + g) * LANES), load(least_sums)));
        }
    }

    struct InCache {
        CacheRows<C> value, ahead;  // of this tile, of the next
        int dim;
        void load(int part, int four, bool wanted, ivec* x) const {
            Coding::values(value.from(4 * four), part, x);
            for (int i = 0; i < 4 && wanted; i++)
                prefetch_line(ahead[4 * four + i], Words<C>::stride(dim), part, dim / (4 * LANES));
        }
    };
    struct Packed {
        const float* lines;
        void load(int part, int four, bool, ivec* x) const {
            for (int v = 0; v < 4; v++) x[v] = load_bytes(lines + ((part * 4 + four) * 4 + v) * LANES);
        }
    };

    // sums[row] += weights[row] . value. weights: of 16 keys for each row, as softmax_update leaves them.
    static void add_all(const float* weights, CacheRows<C> value, CacheRows<C> ahead, int dim, int first, int last,
                        bool many, float* lines, float* bytes, int record, float* sums) {
        if (dim == USUAL_DIM)
            add_rows(weights, {value, ahead, USUAL_DIM}, first, last, many, lines, bytes, record, sums);
        else
            add_rows(weights, {value, ahead, dim}, first, last, many, lines, bytes, record, sums);
    }
    INLINE void add_rows(const float* weights, InCache in_cache, int first, int last, bool many, float* lines,
                         float* bytes, int record, float* sums) {
        const int dim = in_cache.dim, words = weight_words(dim);
        alignas(64) float steps[2 * GROUPS * LANES * Coding::MOST_SPANS];
        for (int span = 0; span < Coding::spans(dim); span++)
            Coding::all_steps(in_cache.value, dim, span, steps + span * 2 * GROUPS * LANES);
        for (int r = first; r < last; r++)
            weigh(load(weights + r * LANES), steps, dim, sums + r * record + VALUES + dim, bytes + r * words);
        if (many)
            for (int part = 0; part < dim / (4 * LANES); part++)
                for (int four = 0; four < 4; four++) {
                    ivec x[4];
                    in_cache.load(part, four, true, x);
                    for (int v = 0; v < 4; v++) store(lines + ((part * 4 + four) * 4 + v) * LANES, (vec)x[v]);
                }
        for_rows<2>(first, last, [&](auto R, int r) __attribute__((always_inline)) {
            float* its = sums + r * record + VALUES;
            if (many)
                add_values<R, false>(bytes + r * words, Packed{lines}, dim, record, its);
            else if (r == first)
                add_values<R, true>(bytes + r * words, in_cache, dim, record, its);
            else
                add_values<R, false>(bytes + r * words, in_cache, dim, record, its);
        });
    }

    template <int R, bool WANTED, typename Values>
    INLINE void add_values(const float* bytes, const Values& values, int dim, int record, float* sums) {
        const int words = weight_words(dim), parts = dim / (4 * LANES) / Coding::spans(dim);
        for (int part = 0; part < dim / (4 * LANES); part++, sums += 4 * LANES) {
            const float* its = bytes + part / parts * WEIGHT_WORDS;
            ivec high[R][4] = {}, low[R][4] = {};
            for (int four = 0; four < 4; four++) {
                ivec x[4];
                values.load(part, four, WANTED, x);
                for (int r = 0; r < R; r++) {
                    const ivec h = Coding::weights(its + r * words + HIGH + 4 * four);
                    const ivec l = Coding::weights(its + r * words + LOW + 4 * four);
                    for (int v = 0; v < 4; v++)
                        high[r][v] = add_fours(high[r][v], h, x[v]), low[r][v] = add_fours(low[r][v], l, x[v]);
                }
            }
            for (int r = 0; r < R; r++)
                for (int v = 0; v < 4; v++) {
                    float* to = sums + r * record + v * LANES;
                    store(to, multiply_add(as_floats(high[r][v], low[r][v]), load(its + r * words + SCALE), load(to)));
                }
        }
    }

    template <typename T>
    static void finish(const float* sums, int dim, T* to) {  // one row
        const float weight = fold_lanes(load(sums + WEIGHTS), plus)[0];
        float least[HAS_LEASTS ? GROUPS * Coding::MOST_SPANS : 1] = {};
        for (int g = 0; g < least_sums(dim) / LANES; g++)
            least[g] = fold_lanes(load(sums + VALUES + dim + g * LANES), plus)[0];
        for (int i = 0; i < dim; i++)
            narrow((sums[VALUES + i] + least[Coding::group(i)]) / weight, to + Coding::place(i));
    }
};
#endif
