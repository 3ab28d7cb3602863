// Lesson 9. y = x W^T over packed weights: each weight is read once per step, in order, and used for all rows.
//
// A "word" is 4 bytes: one float, or two neighbouring bfloat16 of a row. Packed, the words of TILE outputs lie side by
// side, so that one 64-byte line holds the weights of TILE outputs for the same inputs:
//
//   line i of a tile: word i of output 0, word i of output 1, ... word i of output 15
//
// An output is summed in one lane, word after word, whatever other rows there are: the order of the additions depends
// only on the number of inputs.

#pragma once
#include "../attention/vectors.h"

#include <vector>

#if defined(_OPENMP)
#include <omp.h>
static int thread_number() { return omp_get_thread_num(); }
static int team_size() { return omp_get_num_threads(); }
#else
static int thread_number() { return 0; }
static int team_size() { return 1; }
#endif

static void barrier() {  // all threads of a team wait for each other
#pragma omp barrier
}

constexpr int TILE = 16;                          // outputs packed together
constexpr int PARTS = TILE / LANES;               // vectors in a line
constexpr int TILES = LANES == 16 ? 2 : 1;        // tiles summed at once; limited by the number of registers
constexpr int ROWS = LANES == 16 ? 12 : LANES == 8 ? 5 : 3;  // rows that share each load of a weight
constexpr int MANY_ROWS = 8 * ROWS;               // per thread; from here on threads divide the rows, not the weights
constexpr int MANY_PAIRS = 8;                     // of tiles; from here on interleaving rows pays
constexpr int64_t NEAR = 2 << 10;                 // bytes from a single row's weight to the one to prefetch
constexpr int64_t BLOCK_BYTES = 128 << 10;        // of rows: a small part of a second-level cache

template <typename T>
constexpr int PER_WORD = 4 / sizeof(T);

// Load or store up to LANES elements; lanes past the count become 0, or are not written.
template <typename T>
INLINE vec load_some(const T* p, int64_t count) {
    vec x = {};
    if (count < LANES)
        for (int i = 0; i < count; i++) x[i] = widen(p[i]);
    else if constexpr (sizeof(T) == 4)
        x = load((const float*)p);
    else {
        halves upper;
        memcpy(&upper, p, sizeof upper);
        x = (vec)(__builtin_convertvector(upper, uvec) << 16);
    }
    return x;
}
template <typename T>
INLINE void store_some(T* p, vec x, int64_t count) {
    if (count < LANES)
        for (int i = 0; i < count; i++) narrow(x[i], p + i);
    else
        store(p, x);
}

// sum + w . x for one word of each lane's output and the row's word.
INLINE vec add_product(vec sum, ivec w, int32_t x, float) { return sum + (vec)w * (vec)(ivec{} + x); }
INLINE vec add_product(vec sum, ivec w, int32_t x, bf16) { return add_pairs(sum, w, ivec{} + x); }

struct Ahead {  // what to prefetch meanwhile: for each word, both addresses advance by `by` bytes
    const char* tile[2];
    int64_t by;
};

// sums[r * 2 * TILE + output] = row r . output, for R rows and TILES tiles of weights. INTERLEAVED: by interleave_rows.
template <int R, bool INTERLEAVED, typename T>
static void dot(const T* x, int64_t x_stride, int inputs, const int32_t* const* tiles, Ahead ahead, float* sums) {
    constexpr int V = TILES * PARTS;
    const int64_t next_row = INTERLEAVED ? PER_WORD<T> : x_stride, next_word = PER_WORD<T> * (INTERLEAVED ? R : 1);
    vec sum[R][V] = {};
    const auto step = [&](int word, auto x_word) __attribute__((always_inline)) {
        ivec w[V];
        UNROLL for (int v = 0; v < V; v++)
            memcpy(&w[v], tiles[v / PARTS] + word * TILE + v % PARTS * LANES, sizeof w[v]);
        UNROLL for (int t = 0; t < TILES; t++) prefetch(ahead.tile[t] + word * ahead.by);
        UNROLL for (int r = 0; r < R; r++) {
            const int32_t its = x_word(r);
            UNROLL for (int v = 0; v < V; v++) sum[r][v] = add_product(sum[r][v], w[v], its, T{});
        }
    };
    const int words = (INTERLEAVED ? inputs + PER_WORD<T> - 1 : inputs) / PER_WORD<T>;
    for (int word = 0; word < words; word++)
        step(word, [&](int r) {
            int32_t its;
            memcpy(&its, x + r * next_row + word * next_word, 4);
            return its;
        });
    if (!INTERLEAVED && inputs % PER_WORD<T>)  // an odd last input: the other half of its word might be NaN
        step(words, [&](int r) {
            int32_t its = 0;
            memcpy(&its, x + r * next_row + words * next_word, sizeof(T));
            return its;
        });
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) store(sums + r * 2 * TILE + v * LANES, sum[r][v]);
}

template <bool INTERLEAVED, int R = ROWS, typename T>
static void dot_rows(int rows, const T* x, int64_t x_stride, int inputs, const int32_t* const* tiles, Ahead ahead,
                     float* sums) {
    if (rows == R) return dot<R, INTERLEAVED>(x, x_stride, inputs, tiles, ahead, sums);
    if constexpr (R > 1) dot_rows<INTERLEAVED, R - 1>(rows, x, x_stride, inputs, tiles, ahead, sums);
}

template <typename T>
static int64_t words(int64_t inputs) {
    return (inputs + PER_WORD<T> - 1) / PER_WORD<T>;
}

template <typename T>
struct Rows {  // activations: `count` rows of `width`, `stride` apart
    T* data;
    int64_t count, width, stride;
    T* at(int64_t row) const { return data + row * stride; }
};

struct Range {
    int64_t begin, end;
    int64_t size() const { return end - begin; }
    Range part(int64_t i, int64_t of) const { return {begin + size() * i / of, begin + size() * (i + 1) / of}; }
};

static int64_t groups_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }

// Copy each group's rows so that `dot` reads one stream: word 0 of each row, word 1 of each row, and so on. A dozen
// separate rows are more streams than a processor fetches ahead by itself.
template <typename T>
static const int32_t* interleave_rows(Rows<const T> x, Range block, std::vector<int32_t>& interleaved) {
    const int64_t words = ::words<T>(x.width), groups = groups_of(block.size());
    interleaved.resize(block.size() * words + LANES);
    int32_t* to = interleaved.data();
    for (int64_t group = 0; group < groups; group++) {
        const Range rows = block.part(group, groups);
        for (int64_t word = 0; word < words; word += LANES) {
            vec lines[LANES] = {};
            const int64_t at = word * PER_WORD<T>, count = std::min<int64_t>(LANES * PER_WORD<T>, x.width - at);
            for (int64_t r = 0; r < rows.size(); r++) memcpy(lines + r, x.at(rows.begin + r) + at, count * sizeof(T));
            transpose(lines);
            for (int64_t i = 0; i < LANES && word + i < words; i++, to += rows.size())
                store((float*)to, lines[i]);  // the next line overwrites its spare lanes
        }
    }
    return interleaved.data();
}

struct RowBlock {
    Range rows, pairs;           // pairs of tiles
    const int32_t* interleaved;  // what interleave_rows made of the rows, or nullptr
    int64_t after;               // the pair to prefetch during the last one
};

// For a block's rows, in groups of up to ROWS, and each of its pairs, call write(first row, rows, pair, sums [rows][2
// * TILE]), which fills `width` columns of `to`. While all groups use one pair, the next is prefetched, a part of it
// by each group, and so are the lines that the group's results go to: memory is never idle. A single row reads on as
// fast as memory delivers, and needs only what comes soon.
template <typename T, typename O, typename F, typename G>
static void each_group(Rows<const T> x, const RowBlock& block, const F& tiles_of, Rows<O> to, int64_t width,
                       const G& write) {
    const int64_t words = ::words<T>(x.width), groups = groups_of(block.rows.size());
    const bool alone = block.rows.size() == 1;
    const auto dots = block.interleaved ? dot_rows<true, ROWS, T> : dot_rows<false, ROWS, T>;
    for (int64_t pair = block.pairs.begin; pair < block.pairs.end; pair++) {
        const int32_t *tiles[2], *next[2];
        tiles_of(pair, tiles);
        tiles_of(pair + 1 < block.pairs.end ? pair + 1 : block.after, next);
        for (int64_t group = 0; group < groups; group++) {
            const Range r = block.rows.part(group, groups);
            for (int64_t row = r.begin; row < r.end; row++) prefetch_to_write(to.at(row) + pair * width);
            const int64_t before = r.begin - block.rows.begin;
            const T* rows = block.interleaved ? (const T*)(block.interleaved + before * words) : x.at(r.begin);
            alignas(64) float sums[ROWS * 2 * TILE];
            const int64_t part = 4 * TILE * words * group / groups, step = (64 + groups - 1) / groups;
            for (int t = 0; t < 2; t += TILES) {
                const auto ahead_of = [&](int tile) {
                    return alone ? (const char*)tiles[tile] + NEAR : (const char*)next[tile] + part;
                };
                const Ahead ahead{{ahead_of(t), ahead_of(t + TILES - 1)}, step};
                dots(int(r.size()), rows, x.stride, int(x.width), tiles + t, ahead, sums + t * TILE);
            }
            write(r.begin, int(r.size()), pair, sums);
        }
    }
}

// `each_group` for all rows and pairs, called by all threads of a team. Few rows: each thread owns some pairs, so one
// thread reads each weight. Many rows: a thread takes block after block of rows, which stays in its second-level cache
// while all weights pass by. There is no barrier at the end.
template <typename T, typename O, typename F, typename G>
static void each_pair(Rows<const T> x, int64_t count, const F& tiles_of, Rows<O> to, int64_t width, const G& write) {
    const Range all{0, x.count}, pairs{0, count}, own = pairs.part(thread_number(), team_size());
    std::vector<int32_t> room;
    if (x.count < MANY_ROWS * team_size()) {
        const bool pays = x.count >= ROWS && own.size() >= MANY_PAIRS;
        const RowBlock block{all, own, pays ? interleave_rows(x, all, room) : nullptr, own.end - 1};
        return each_group(x, block, tiles_of, to, width, write);
    }
    const int64_t each = (x.count * x.width * int64_t(sizeof(T)) / team_size() + BLOCK_BYTES - 1) / BLOCK_BYTES;
    const int64_t blocks = std::min(each * team_size(), groups_of(x.count));
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < blocks; i++) {
        const Range rows = all.part(i, blocks);
        each_group(x, {rows, pairs, interleave_rows(x, rows, room), pairs.begin}, tiles_of, to, width, write);
    }
}

struct Matrix {  // a packed [outputs, inputs], and its bias or nullptr
    const void *tiles, *bias;
    int64_t outputs;
};

// Compute x W^T + bias, calling write(place in `to`, count, sums) for up to LANES outputs of a row at a time.
template <typename T, typename O, typename F>
static void linear(Rows<const T> x, const Matrix& m, Rows<O> to, const F& write) {
    const int64_t tiles = (m.outputs + TILE - 1) / TILE, size = TILE * words<T>(x.width);
    const auto tiles_of = [&](int64_t pair, const int32_t** two) {
        two[0] = (const int32_t*)m.tiles + 2 * pair * size;
        two[1] = 2 * pair + 1 < tiles ? two[0] + size : two[0];
    };
    const auto write_rows = [&](int64_t first, int rows, int64_t pair, const float* sums) {
        for (int i = 0; i < 2 * TILE; i += LANES) {
            const int64_t at = pair * 2 * TILE + i, count = m.outputs - at;
            if (count <= 0) break;
            const vec bias = m.bias ? load_some((const T*)m.bias + at, count) : vec{} - 0.f;  // x + -0 is x, -0 too
            for (int r = 0; r < rows; r++) write(to.at(first + r) + at, count, load(sums + r * 2 * TILE + i) + bias);
        }
    };
    each_pair(x, (tiles + 1) / 2, tiles_of, to, 2 * TILE, write_rows);
}
