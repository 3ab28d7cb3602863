// Lesson 17. Scores of keys that are codes (codes.h): the same as tile.h's score and score_transposed.

#pragma once
#include "codes.h"

#if MULTIPLIES_BYTES
template <typename C>
struct CodeScores {
    using Coding = typename Words<C>::Coding;
    static constexpr int GROUPS = Coding::GROUPS;
    static constexpr bool HAS_LEASTS = GROUPS > 1;

    // A query: for each span its vectors, high and low, and the sum of each group's numbers (with one group: what the
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
            const vec each = as_floats(sums[0], sums[1]);  // word's
            store(to, HAS_LEASTS ? sum_fours(each) : fold_lanes(each, plus) * Coding::OFFSET);
        }
        store(to, vec{} + top / QUERY_LEVELS);
    }

    static void score_all(const float* q, CacheRows<C> key, CacheRows<C> ahead, int dim, int first, int last, bool many,
                          float* lines, float* scores) {
        if (dim == USUAL_DIM) return score_rows(q, key, ahead, USUAL_DIM, first, last, many, lines, scores);
        score_rows(q, key, ahead, dim, first, last, many, lines, scores);
    }
    INLINE void score_rows(const float* q, CacheRows<C> key, CacheRows<C> ahead, int dim, int first, int last,
                           bool many, float* lines, float* scores) {
        const int words = query_words(dim);
        if (many) {
            transpose_keys(key, ahead, dim, lines);
            return for_rows(first, last, [&](auto R, int r) __attribute__((always_inline)) {
                score_transposed<R>(q + r * words, lines, dim, scores + r * LANES);
            });
        }
        for_rows<2>(first, last, [&](auto R, int r) __attribute__((always_inline)) {
            if (r == first)
                score<R, true>(q + r * words, key, ahead, dim, scores + r * LANES);
            else
                score<R, false>(q + r * words, key, ahead, dim, scores + r * LANES);
        });
    }

    INLINE vec score_of(vec sum, const float* q, int words) {
        if (!HAS_LEASTS) sum += load(q + words - 2 * LANES);
        return sum * load(q + words - LANES);
    }
    // A quarter of a vector has its own group, or all have one. Up to there sums are whole numbers, and exact.
    INLINE vec restored(vec sum, ivec whole, Steps s, vec query_sums) {
        return multiply_add(__builtin_convertvector(whole, vec), s.step, multiply_add(query_sums, s.least, sum));
    }

    template <int R, bool WANTED>
    INLINE void score(const float* q, CacheRows<C> key, CacheRows<C> ahead, int dim, float* scores) {
        const int words = query_words(dim), vectors = Coding::vectors(dim);
        vec sums[R][4];  // four keys' each: in each quarter a word of each key
        UNROLL for (int four = 0; four < 4; four++) {
            const CacheRows<C> keys = key.from(4 * four), next = ahead.from(4 * four);
            vec sum[R] = {};
            const float* at = q;
            for (int span = 0; span < Coding::spans(dim); span++, at += span_words(dim)) {
                ivec high[R][4] = {}, low[R][4] = {};
                for (int v = 0; v < vectors; v++) {
                    ivec h[R], l[R];
                    UNROLL for (int r = 0; r < R; r++) {
                        h[r] = load_bytes(at + r * words + 2 * v * LANES);
                        l[r] = load_bytes(at + r * words + (2 * v + 1) * LANES);
                    }
                    UNROLL for (int i = 0; i < 4; i++) {
                        const ivec k = Coding::key(keys[i], span, v);
                        if (WANTED) prefetch_key(next[i], dim, span, v);
                        UNROLL for (int r = 0; r < R; r++)
                            high[r][i] = add_fours(high[r][i], k, h[r]), low[r][i] = add_fours(low[r][i], k, l[r]);
                    }
                }
                ivec whole[R];
                UNROLL for (int r = 0; r < R; r++) {
                    UNROLL for (int i = 0; i < 4; i++) low[r][i] += high[r][i] << 8;
                    whole[r] = sum_quarters(low[r]);
                }
                if constexpr (HAS_LEASTS) {
                    const Steps s = Coding::steps(keys, dim, span);
                    UNROLL for (int r = 0; r < R; r++)
                        sum[r] = restored(sum[r], whole[r], s, load(at + r * words + 2 * vectors * LANES));
                } else
                    UNROLL for (int r = 0; r < R; r++) sum[r] += __builtin_convertvector(whole[r], vec);
            }
            UNROLL for (int r = 0; r < R; r++) sums[r][four] = sum[r];
        }
        UNROLL for (int r = 0; r < R; r++)
            store(scores + r * LANES, score_of(join_quarters(sums[r]), q + r * words, words));
    }

    INLINE void prefetch_key(const C* row, int dim, int span, int v) {
        const int each = Coding::vectors(dim);
        prefetch_line(row, Words<C>::stride(dim), span * each + v, Coding::spans(dim) * each);
    }

    // Line after line of words, lane j is key j's: for each span its vectors, then steps and leasts of several groups.
    static int span_lines(int dim) { return Coding::vectors(dim) * LANES + (HAS_LEASTS ? 2 * GROUPS : 0); }
    INLINE void transpose_keys(CacheRows<C> key, CacheRows<C> ahead, int dim, float* lines) {
        for (int span = 0; span < Coding::spans(dim); span++) {
            vec lanes[LANES];
            for (int v = 0; v < Coding::vectors(dim); v++) {
                for (int j = 0; j < LANES; j++) {
                    lanes[j] = (vec)Coding::key(key[j], span, v);
                    prefetch_key(ahead[j], dim, span, v);
                }
                transpose(lanes);
                for (int i = 0; i < LANES; i++, lines += LANES) store(lines, lanes[i]);
            }
            if constexpr (HAS_LEASTS) Coding::all_steps(key, dim, span, lines), lines += 2 * GROUPS * LANES;
        }
    }

    // `score` to the same bit: what was a quarter's word is one vector here.
    template <int R>
    INLINE void score_transposed(const float* q, const float* lines, int dim, float* scores) {
        const int words = query_words(dim), vectors = Coding::vectors(dim);
        vec sums[R][4];
        for (int quarter = 0; quarter < 4; quarter++) {
            vec sum[R] = {};
            const float *at = q, *line = lines;
            for (int span = 0; span < Coding::spans(dim); span++) {
                ivec high[R] = {}, low[R] = {};
                for (int v = 0; v < vectors; v++)
                    for (int word = 4 * quarter; word < 4 * quarter + 4; word++) {
                        const ivec k = load_bytes(line + (v * LANES + word) * LANES);
                        for (int r = 0; r < R; r++) {
                            const float* its = at + r * words + 2 * v * LANES + word;
                            high[r] = add_fours(high[r], k, (ivec)all_lanes(its));
                            low[r] = add_fours(low[r], k, (ivec)all_lanes(its + LANES));
                        }
                    }
                if constexpr (HAS_LEASTS) {
                    const float* its = line + (vectors * LANES + quarter) * LANES;
                    const Steps s = {load(its), load(its + GROUPS * LANES)};
                    for (int r = 0; r < R; r++)
                        sum[r] = restored(sum[r], (high[r] << 8) + low[r], s,
                                          all_lanes(at + r * words + 2 * vectors * LANES + 4 * quarter));
                } else
                    for (int r = 0; r < R; r++) sum[r] += as_floats(high[r], low[r]);
                at += span_words(dim), line += span_lines(dim) * LANES;
            }
            for (int r = 0; r < R; r++) sums[r][quarter] = sum[r];
        }
        for (int r = 0; r < R; r++) {
            const vec sum = (sums[r][0] + sums[r][2]) + (sums[r][1] + sums[r][3]);
            store(scores + r * LANES, score_of(sum, q + r * words, words));
        }
    }
};
#endif
