// Lesson 17. Scores of keys that are codes (codes.h): the same as tile.h's score and score_transposed.

#pragma once
#include "codes.h"

#if MULTIPLIES_BYTES
template <typename C>
struct CodeScores {
    using Coding = typename Words<C>::Coding;
    static constexpr int GROUPS = Coding::GROUPS;
    static constexpr bool HAS_LEASTS = GROUPS > 1;

    // A query: for each span its vectors, high and low, and the sum of each word's numbers (with one group: what the
    // offset of codes adds to a score); in the end its scale.
    static int span_words(int dim) { return (2 * Coding::vectors(dim) + 1) * LANES; }
    static int query_words(int dim) { return Coding::spans(dim) * span_words(dim) + LANES; }

    template <typename T>
    static void take_query(const T* from, int dim, float* to) {
        const float top = largest_size(from, dim);
        const float factor = top < LEAST_TOP ? 0 : QUERY_LEVELS / top;
        const ivec ones = ivec{} + 0x01010101;
        for (int span = 0; span < Coding::spans(dim); span++, to += LANES) {
            ivec sums[2] = {};
            for (int v = 0; v < Coding::vectors(dim); v++, to += 2 * LANES) {
                int8_t high[4 * LANES], low[4 * LANES];
                for (int i = 0; i < 4 * LANES; i++) {
                    const float level = widen(from[Coding::number(span, v, i)]) * factor + 12582912.f;  // 1.5 * 2^23
                    int32_t whole;  // its lowest bits
                    memcpy(&whole, &level, sizeof whole);
                    high[i] = int8_t(int16_t(whole + 128) >> 8), low[i] = int8_t(whole);
                }
                memcpy(to, high, sizeof high), memcpy(to + LANES, low, sizeof low);
                sums[0] = add_fours(sums[0], ones, load_bytes(high));
                sums[1] = add_fours(sums[1], ones, load_bytes(low));
            }
            const vec each = as_floats(sums[0], sums[1]);
            store(to, HAS_LEASTS ? each : fold_lanes(each, plus) * Coding::OFFSET);
        }
        store(to, vec{} + top / QUERY_LEVELS);
    }

    static void score_all(const float* q, const C* const* key, int dim, int first, int last, bool many, float* lines,
                          float* scores) {
        if (dim == USUAL_DIM) return score_rows(q, key, USUAL_DIM, first, last, many, lines, scores);
        score_rows(q, key, dim, first, last, many, lines, scores);
    }
    INLINE void score_rows(const float* q, const C* const* key, int dim, int first, int last, bool many, float* lines,
                           float* scores) {
        const int words = query_words(dim);
        if (many) {
            transpose_keys(key, dim, lines);
            return for_rows(first, last, [&](auto R, int r) __attribute__((always_inline)) {
                score_transposed<R>(q + r * words, lines, dim, scores + r * LANES);
            });
        }
        for_rows<2>(first, last, [&](auto R, int r) __attribute__((always_inline)) {
            score<R>(q + r * words, key, dim, scores + r * LANES);
        });
    }

    INLINE vec score_of(vec sum, const float* q, int words) {
        if (!HAS_LEASTS) sum += load(q + words - 2 * LANES);
        return sum * load(q + words - LANES);
    }
    INLINE vec restored(vec sum, ivec high, ivec low, Steps s, vec query_sums) {
        return multiply_add(as_floats(high, low), s.step, multiply_add(query_sums, s.least, sum));
    }

    template <int R>
    INLINE void score(const float* q, const C* const* key, int dim, float* scores) {
        constexpr int KEYS = SUMS / 2 / R;
        const int words = query_words(dim), vectors = Coding::vectors(dim);
        vec products[R][LANES];
        for (int j = 0; j < LANES; j += KEYS) {
            vec sum[R][KEYS] = {};
            const float* at = q;
            for (int span = 0; span < Coding::spans(dim); span++, at += span_words(dim)) {
                ivec high[R][KEYS] = {}, low[R][KEYS] = {};
                for (int v = 0; v < vectors; v++) {
                    ivec h[R], l[R];
                    for (int r = 0; r < R; r++) {
                        h[r] = load_bytes(at + r * words + 2 * v * LANES);
                        l[r] = load_bytes(at + r * words + (2 * v + 1) * LANES);
                    }
                    for (int i = 0; i < KEYS; i++) {
                        const ivec k = Coding::key(key[j + i], span, v);
                        for (int r = 0; r < R; r++)
                            high[r][i] = add_fours(high[r][i], k, h[r]), low[r][i] = add_fours(low[r][i], k, l[r]);
                    }
                }
                for (int i = 0; i < KEYS; i++)
                    if constexpr (HAS_LEASTS) {
                        const Steps s = Coding::steps(key[j + i], dim, span);
                        for (int r = 0; r < R; r++) {
                            const vec query_sums = load(at + r * words + 2 * vectors * LANES);
                            sum[r][i] = restored(sum[r][i], high[r][i], low[r][i], s, query_sums);
                        }
                    } else
                        for (int r = 0; r < R; r++) sum[r][i] += as_floats(high[r][i], low[r][i]);
            }
            for (int r = 0; r < R; r++)
                for (int i = 0; i < KEYS; i++) products[r][j + i] = sum[r][i];
        }
        for (int r = 0; r < R; r++)
            store(scores + r * LANES, score_of(sum_each(products[r]), q + r * words, words));
    }

    // Line after line of words, lane j is key j's: for each span its vectors, then steps and leasts where they differ.
    static int span_lines(int dim) { return (Coding::vectors(dim) + (HAS_LEASTS ? 2 : 0)) * LANES; }
    INLINE float* store_transposed(vec* lanes, float* lines) {
        transpose(lanes);
        for (int i = 0; i < LANES; i++, lines += LANES) store(lines, lanes[i]);
        return lines;
    }
    INLINE void transpose_keys(const C* const* key, int dim, float* lines) {
        for (int span = 0; span < Coding::spans(dim); span++) {
            vec lanes[LANES], leasts[LANES];
            for (int v = 0; v < Coding::vectors(dim); v++) {
                for (int j = 0; j < LANES; j++) lanes[j] = (vec)Coding::key(key[j], span, v);
                lines = store_transposed(lanes, lines);
            }
            if constexpr (HAS_LEASTS) {
                for (int j = 0; j < LANES; j++) {
                    const Steps s = Coding::steps(key[j], dim, span);
                    lanes[j] = s.step, leasts[j] = s.least;
                }
                lines = store_transposed(leasts, store_transposed(lanes, lines));
            }
        }
    }

    // `score` to the same bit: what was one lane is one vector here.
    template <int R>
    INLINE void score_transposed(const float* q, const float* lines, int dim, float* scores) {
        const int words = query_words(dim), vectors = Coding::vectors(dim);
        vec sums[R][LANES];
        for (int lane = 0; lane < LANES; lane++) {
            vec sum[R] = {};
            const float *at = q + lane, *line = lines + lane * LANES;
            for (int span = 0; span < Coding::spans(dim); span++) {
                ivec high[R] = {}, low[R] = {};
                for (int v = 0; v < vectors; v++) {
                    const ivec k = load_bytes(line + v * LANES * LANES);
                    for (int r = 0; r < R; r++) {
                        const float* its = at + r * words + 2 * v * LANES;
                        high[r] = add_fours(high[r], k, (ivec)all_lanes(its));
                        low[r] = add_fours(low[r], k, (ivec)all_lanes(its + LANES));
                    }
                }
                if constexpr (HAS_LEASTS) {
                    const float* its = line + vectors * LANES * LANES;
                    const Steps s = {load(its), load(its + LANES * LANES)};
                    for (int r = 0; r < R; r++)
                        sum[r] = restored(sum[r], high[r], low[r], s, all_lanes(at + r * words + 2 * vectors * LANES));
                } else
                    for (int r = 0; r < R; r++) sum[r] += as_floats(high[r], low[r]);
                at += span_words(dim), line += span_lines(dim) * LANES;
            }
            for (int r = 0; r < R; r++) sums[r][lane] = sum[r];
        }
        for (int r = 0; r < R; r++) {
            for (int n = LANES / 2; n; n /= 2)
                for (int i = 0; i < n; i++) sums[r][i] += sums[r][i + n];
            store(scores + r * LANES, score_of(sums[r][0], q + r * words, words));
        }
    }
};
#endif
