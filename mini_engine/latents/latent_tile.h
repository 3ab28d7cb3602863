// Lesson 16. One tile of latents, and the rows that meet it there. A row is one head of one query.
//
// The tile holds floats, whatever the cache holds, or pairs of bfloat16 where queries and cache hold them and the
// processor multiplies pairs. Two numbers of a latent are a pair when it is scored, two latents' when they are added
// up. A row's sums are a record of lesson 3's (tile.h): maximum, sum of weights, weighted sum of latents. The order of
// every sum depends on the keys alone, however many rows there are.

#pragma once
#include "../attention/tasks.h"

#include <type_traits>

constexpr int TILE = 32;    // latents in a tile
constexpr int PIECE = 256;  // words of a query that are used together: the first cache has room for them
constexpr int ROWS = 4;     // rows whose sums are in registers together,
constexpr int PART = SUMS / ROWS * LANES;  // and how many numbers of each

// How a cache holds a vector of `dim` numbers: the elements from one to the next, and what they stand for.
template <typename C>
struct Row {
    static int64_t size(int64_t dim) { return dim; }
    static void read(const C* row, int dim, float* to) {
        for (int d = 0; d < dim; d++) to[d] = widen(row[d]);
    }
};

typedef int32_t Pair;  // of bfloat16
INLINE vec add_words(vec sum, vec a, float b) { return sum + a * (vec{} + b); }
INLINE vec add_words(vec sum, vec a, Pair b) { return add_pairs(sum, (ivec)a, ivec{} + b); }

// scores[key][row] += q[row] . tile[key] over the words from ... to - 1. Lanes are rows, and V vectors of them meet K
// keys.
template <int V, typename W>
INLINE void score(const float* q, const W* tile, int line, int from, int to, float* scores, int rows) {
    constexpr int K = SUMS / V;
    vec sum[K][V];
    for (int k = 0; k < K; k++)
        for (int v = 0; v < V; v++) sum[k][v] = from ? load(scores + k * rows + v * LANES) : vec{};
    for (int d = from; d < to; d++) {
        vec x[V];
        for (int v = 0; v < V; v++) x[v] = load(q + (v * line + d) * LANES);
        for (int k = 0; k < K; k++) {
            W word;
            memcpy(&word, tile + k * line + d, sizeof word);
            for (int v = 0; v < V; v++) sum[k][v] = add_words(sum[k][v], x[v], word);
        }
    }
    for (int k = 0; k < K; k++)
        for (int v = 0; v < V; v++) store(scores + k * rows + v * LANES, sum[k][v]);
}

// All rows (whole vectors of them, `line` words each) with the tile's first `count` keys, and some spare ones.
template <typename W>
static NOINLINE void score_tile(const float* q, const W* tile, int line, int words, int count, float* scores,
                                int rows) {
    for (int r = 0; r < rows; r += 2 * LANES)
        for (int from = 0; from < words; from += PIECE) {
            const int to = std::min(words, from + PIECE);
            const float* its = q + int64_t(r) * line;
            if (r + LANES < rows)
                for (int k = 0; k < count; k += SUMS / 2)
                    score<2>(its, tile + k * line, line, from, to, scores + k * rows + r, rows);
            else
                for (int k = 0; k < count; k += SUMS)
                    score<1>(its, tile + k * line, line, from, to, scores + k * rows + r, rows);
        }
}

// Scores become weights 2^(score * scale - maximum). Row r sees keys before seen[r]; `first` is the tile's first key.
// What was summed under a smaller maximum has to be multiplied by factors[r].
static NOINLINE void weigh(float* scores, float scale, int rows, int first, int count, const int32_t* seen,
                           float* factors, float* sums, int record) {
    for (int r = 0; r < rows; r += LANES) {
        ivec limit;
        vec before, total;
        memcpy(&limit, seen + r, sizeof limit);
        for (int j = 0; j < LANES; j++) before[j] = sums[(r + j) * record + MAXIMUM];
        for (int j = 0; j < LANES; j++) total[j] = sums[(r + j) * record + WEIGHTS];
        vec top = before;
        for (int k = 0; k < count; k++) {
            const vec s = ivec{} + (first + k) < limit ? load(scores + k * rows + r) * scale : vec{} - INFINITY;
            store(scores + k * rows + r, s);
            top = larger(top, s);
        }
        const vec factor = exp2(before - top);
        total *= factor;
        for (int k = 0; k < count; k++) {
            const vec weight = exp2(load(scores + k * rows + r) - top);
            store(scores + k * rows + r, weight);
            total += weight;
        }
        store(factors + r, factor);
        for (int j = 0; j < LANES; j++) sums[(r + j) * record + MAXIMUM] = top[j];
        for (int j = 0; j < LANES; j++) sums[(r + j) * record + WEIGHTS] = total[j];
    }
}

// Weights of two keys become pairs, at the place of the first half of them.
static void pair_weights(float* weights, int rows, int count) {
    for (int k = 0; k < count; k += 2)
        for (int r = 0; r < rows; r += LANES) {
            const vec second = k + 1 < count ? load(weights + (k + 1) * rows + r) : vec{};
            const uvec pairs = rounded(load(weights + k * rows + r)) >> 16 | rounded(second);
            store(weights + k / 2 * rows + r, (vec)pairs);
        }
}

// sums[row] = sums[row] * factor + sum of weights[key][row] * tile[key], `count` words of keys. Lanes are numbers of a
// latent.
template <typename W>
static NOINLINE void add_tile(const float* weights, int rows, int count, const W* tile, int line, int width,
                              const float* factors, float* sums, int record) {
    constexpr int V = PART / LANES;
    for (int d = 0; d < width; d += PART)
        for (int r = 0; r < rows; r += ROWS) {
            float* own = sums + r * record + VALUES + d;
            vec sum[ROWS][V];
            for (int i = 0; i < ROWS; i++)
                for (int v = 0; v < V; v++) sum[i][v] = load(own + i * record + v * LANES) * factors[r + i];
            for (int k = 0; k < count; k++) {
                vec x[V];
                for (int v = 0; v < V; v++) x[v] = load((const float*)tile + k * line + d + v * LANES);
                for (int i = 0; i < ROWS; i++) {
                    W weight;
                    memcpy(&weight, weights + k * rows + r + i, sizeof weight);
                    for (int v = 0; v < V; v++) sum[i][v] = add_words(sum[i][v], x[v], weight);
                }
            }
            for (int i = 0; i < ROWS; i++)
                for (int v = 0; v < V; v++) store(own + i * record + v * LANES, sum[i][v]);
        }
}
