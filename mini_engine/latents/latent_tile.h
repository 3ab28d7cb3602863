// Lesson 16. One tile of latents, and the rows that meet it there. A row is one head of one query.
//
// The tile holds floats, whatever the cache holds. A row's sums are a record of lesson 3's (tile.h): maximum, sum of
// weights, weighted sum of latents. The order of every sum depends on the keys alone, however many rows there are.

#pragma once
#include "../attention/tasks.h"

constexpr int TILE = 32;    // latents in a tile
constexpr int PIECE = 256;  // numbers of a query that are used together: the first cache has room for them
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

// scores[key][row] += q[row] . tile[key] over the numbers from ... to - 1. Lanes are rows, and V vectors of them meet K
// keys.
template <int V>
INLINE void score(const float* q, const float* tile, int line, int from, int to, float* scores, int rows) {
    constexpr int K = SUMS / V;
    vec sum[K][V];
    for (int k = 0; k < K; k++)
        for (int v = 0; v < V; v++) sum[k][v] = from ? load(scores + k * rows + v * LANES) : vec{};
    for (int d = from; d < to; d++) {
        vec x[V];
        for (int v = 0; v < V; v++) x[v] = load(q + (v * line + d) * LANES);
        for (int k = 0; k < K; k++) {
            const vec number = vec{} + tile[k * line + d];
            for (int v = 0; v < V; v++) sum[k][v] += x[v] * number;
        }
    }
    for (int k = 0; k < K; k++)
        for (int v = 0; v < V; v++) store(scores + k * rows + v * LANES, sum[k][v]);
}

// All rows (whole vectors of them, `line` numbers each) with the tile's first `count` keys, and some spare ones.
static NOINLINE void score_tile(const float* q, const float* tile, int line, int numbers, int count, float* scores,
                                int rows) {
    for (int r = 0; r < rows; r += 2 * LANES)
        for (int from = 0; from < numbers; from += PIECE) {
            const int to = std::min(numbers, from + PIECE);
            const float* its = q + int64_t(r) * line;
            if (r + LANES < rows)
                for (int k = 0; k < count; k += SUMS / 2)
                    score<2>(its, tile + k * line, line, from, to, scores + k * rows + r, rows);
            else
                for (int k = 0; k < count; k += SUMS)
                    score<1>(its, tile + k * line, line, from, to, scores + k * rows + r, rows);
        }
}

// Scores become weights 2^(score - maximum). Row r sees keys before seen[r]; `first` is the tile's first key. What was
// summed under a smaller maximum has to be multiplied by factors[r].
static NOINLINE void weigh(float* scores, int rows, int first, int count, const int32_t* seen, float* factors,
                           float* sums, int record) {
    for (int r = 0; r < rows; r += LANES) {
        ivec limit;
        vec before, total;
        memcpy(&limit, seen + r, sizeof limit);
        for (int j = 0; j < LANES; j++) before[j] = sums[(r + j) * record + MAXIMUM];
        for (int j = 0; j < LANES; j++) total[j] = sums[(r + j) * record + WEIGHTS];
        vec top = before;
        for (int k = 0; k < count; k++) {
            const vec s = ivec{} + (first + k) < limit ? load(scores + k * rows + r) : vec{} - INFINITY;
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

// sums[row] = sums[row] * factor + sum of weights[key][row] * tile[key]. Lanes are numbers of a latent.
static NOINLINE void add_tile(const float* weights, int rows, int count, const float* tile, int line, int width,
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
                for (int v = 0; v < V; v++) x[v] = load(tile + k * line + d + v * LANES);
                for (int i = 0; i < ROWS; i++) {
                    const vec weight = vec{} + weights[k * rows + r + i];
                    for (int v = 0; v < V; v++) sum[i][v] += weight * x[v];
                }
            }
            for (int i = 0; i < ROWS; i++)
                for (int v = 0; v < V; v++) store(own + i * record + v * LANES, sum[i][v]);
        }
}
