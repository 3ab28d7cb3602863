// Lesson 3. One tile of keys: LANES keys and values of one head, and the rows of queries that meet them there. The
// order of every sum depends on the keys alone, however many rows there are.

#pragma once
#include "vectors.h"

#include <type_traits>

#define NOINLINE __attribute__((noinline))  // one copy, so that every caller rounds alike
constexpr int USUAL_DIM = 128;       // of a head: the compiler makes separate loops for it
constexpr float NO_KEY_YET = -1e30f;        // a row's first maximum: finite, so that subtracting it never gives NaN

// A row's running sums lie in one record, in whole vectors: the maximum score (and what it becomes), the sum of weights
// (still spread over the lanes), the weighted sum of values.
enum { MAXIMUM = 0, NEW_MAXIMUM = 1, WEIGHTS = LANES, VALUES = 2 * LANES };

template <typename T>
struct CacheRows {  // one head's keys, or values, of a tile
    const T* const* row;  // each token's, of all heads
    int64_t at;           // where the head's begins
    const T* operator[](int j) const { return row[j] + at; }
    CacheRows from(int j) const { return {row + j, at}; }
};

// What is multiplied are words of 4 bytes: floats, or pairs of bfloat16 where the processor has an instruction for
// them. A pair is two neighbours in a query and in a key; then it is two keys' weights, and those keys' values.
template <typename T>
struct Layout {  // of a cache that holds what the queries hold
    using Element = T;  // what the loops over a key or a value load
    static int64_t stride(int dim) { return dim; }                           // elements from one head to the next
    static vec scales(CacheRows<T>, int) { return vec{} + 1.f; }  // what multiplies each key, or value
    static void open(CacheRows<T> row, int dim, T* to, int width) {  // LANES rows, each `width` after the one before
        for (int j = 0; j < LANES; j++) std::copy(row[j], row[j] + dim, to + j * width);
    }
    static void store_values(T* p, const vec* x) { store_joined(p, x); }
};
template <typename C>
constexpr bool CODED = false;  // a cache's codes are multiplied as they lie there: by lesson 17's two
template <typename C>
struct CodeScores;
template <typename C>
struct CodeValues;
template <typename T>
struct Words : Layout<T> {
    static constexpr int PIECES = PER_LOAD<T>, KEYS = 1;  // vectors of words in a key's load; keys in a word of weights
    static void load_query(const T* p, vec* x) { load_key(p, x); }
    static void load_key(const T* p, vec* x) { load_split(p, x); }
    static void load_values(CacheRows<T> value, int d, vec* x) { load_split(value[0] + d, x); }
    static void store_weights(float* p, vec weights) { store(p, weights); }
    static vec add(vec sum, vec a, vec b) { return sum + a * b; }
};
#if defined(__AVX512BF16__)
template <>
struct Words<bf16> : Layout<bf16> {
    static constexpr int PIECES = 1, KEYS = 2;
    static void load_query(const bf16* p, vec* x) { load_key(p, x); }
    static void load_key(const bf16* p, vec* x) { memcpy(x, p, sizeof *x); }
    static void load_values(CacheRows<bf16> value, int d, vec* x) {  // of each 8 elements of both 4, then the others
        const __m512i a = _mm512_loadu_si512(value[0] + d), b = _mm512_loadu_si512(value[1] + d);
        x[0] = (vec)_mm512_unpacklo_epi16(a, b), x[1] = (vec)_mm512_unpackhi_epi16(a, b);
    }
    static void store_values(bf16* p, const vec* x) {
        const __m512i first = (__m512i)(rounded(x[0]) >> 16), others = (__m512i)(rounded(x[1]) >> 16);
        _mm512_storeu_si512(p, _mm512_packus_epi32(first, others));
    }
    static void store_weights(float* p, vec weights) { store((bf16*)p, weights); }
    static vec add(vec sum, vec a, vec b) { return add_pairs(sum, (ivec)a, (ivec)b); }
};
#endif
INLINE vec all_lanes(const float* word) {
    int32_t bits;
    memcpy(&bits, word, sizeof bits);
    return (vec)(ivec{} + bits);
}

// scores[row][j] = q[row] . key[j], from the keys in place: a word in each lane, and in the end all lanes summed. Keys
// are taken in the groups that sum_each adds up first, so that their sums never leave the registers. Meanwhile the same
// parts of the keys `ahead` are prefetched, if they are wanted.
template <int R, bool WANTED, typename T>
INLINE void score(const float* q, CacheRows<T> key, CacheRows<T> ahead, int words, float* scores) {
    constexpr int KEYS = std::min(LANES, SUMS / R), GROUPS = LANES / KEYS, P = Words<T>::PIECES;
    vec totals[R][GROUPS];
    UNROLL for (int group = 0; group < GROUPS; group++) {
        vec sum[R][KEYS] = {};
        for (int at = 0, d = 0; at < words; at += P * LANES, d += PER_LOAD<T> * LANES) {
            vec x[R][P], k[P];
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int p = 0; p < P; p++) x[r][p] = load(q + r * words + at + p * LANES);
            UNROLL for (int i = 0; i < KEYS; i++) {
                Words<T>::load_key(key[group + i * GROUPS] + d, k);
                if (WANTED) prefetch(ahead[group + i * GROUPS] + d);
                UNROLL for (int r = 0; r < R; r++)
                    UNROLL for (int p = 0; p < P; p++) sum[r][i] = Words<T>::add(sum[r][i], k[p], x[r][p]);
            }
        }
        UNROLL for (int r = 0; r < R; r++) totals[r][group] = sum_each<KEYS>(sum[r]);
    }
    UNROLL for (int r = 0; r < R; r++) store(scores + r * LANES, sum_each<GROUPS>(totals[r]));
}

// Where many rows meet the same keys, these are transposed once: line after line of words, lane j is key j's.
template <typename T>
static void transpose_keys(CacheRows<T> key, CacheRows<T> ahead, int words, float* lines) {
    constexpr int P = Words<T>::PIECES;
    for (int at = 0, d = 0; at < words; at += P * LANES, d += PER_LOAD<T> * LANES) {
        vec lanes[P][LANES], x[P];
        for (int j = 0; j < LANES; j++) {
            Words<T>::load_key(key[j] + d, x);
            for (int p = 0; p < P; p++) lanes[p][j] = x[p];
            prefetch(ahead[j] + d);
        }
        for (int p = 0; p < P; p++) {
            transpose(lanes[p]);
            for (int i = 0; i < LANES; i++, lines += LANES) store(lines, lanes[p][i]);
        }
    }
}

// `score` over transposed keys, to the same bit: first the words of what was one lane, then the lanes, as in sum_each.
template <int R, typename T>
INLINE void score_transposed(const float* q, const float* lines, int words, float* scores) {
    constexpr int QUARTER = LANES / 4;
    vec sums[R][QUARTER];
    for (int lane = 0; lane < QUARTER; lane++) {
        vec sum[R][4] = {};
        for (int word = lane; word < words; word += LANES)
            for (int i = 0; i < 4; i++) {
                const vec k = load(lines + (word + i * QUARTER) * LANES);
                for (int r = 0; r < R; r++)
                    sum[r][i] = Words<T>::add(sum[r][i], k, all_lanes(q + r * words + word + i * QUARTER));
            }
        for (int r = 0; r < R; r++) sums[r][lane] = (sum[r][0] + sum[r][2]) + (sum[r][1] + sum[r][3]);
    }
    for (int r = 0; r < R; r++) {
        for (int n = QUARTER / 2; n; n /= 2)
            for (int i = 0; i < n; i++) sums[r][i] += sums[r][i + n];
        store(scores + r * LANES, sums[r][0]);
    }
}

// Scores become weights 2^(score - maximum), in words and times their values' scales; what was summed under a smaller
// maximum is scaled down first. Three passes over the rows: within one no row waits for another, and a wrong guess
// whether a maximum grows costs little. The first query sees `visible` keys, each further one a key more; but only the
// last `window` of them.
template <typename T>
static NOINLINE void softmax_update(float* scores, int rows, vec scale, vec value_scale, int visible, int window,
                                    int group, float* sums, int record) {
    ivec lane;
    for (int j = 0; j < LANES; j++) lane[j] = j;
    for (int r = 0, member = 0; r < rows; r++) {
        const ivec sees = (lane < ivec{} + visible) & (lane >= ivec{} + (visible - window));
        const vec s = sees ? load(scores + r * LANES) * scale : vec{} - INFINITY;
        store(scores + r * LANES, s);
        float* own = sums + r * record;
        own[NEW_MAXIMUM] = std::max(own[MAXIMUM], fold_lanes(s, larger)[0]);
        if (++member == group) member = 0, visible++;
    }
    for (int r = 0; r < rows; r++) {
        float* own = sums + r * record;
        if (own[NEW_MAXIMUM] == own[MAXIMUM]) continue;
        const vec factor = exp2(vec{} + (own[MAXIMUM] - own[NEW_MAXIMUM]));
        for (int d = WEIGHTS; d < record; d += LANES) store(own + d, load(own + d) * factor);
        own[MAXIMUM] = own[NEW_MAXIMUM];
    }
    for (int r = 0; r < rows; r++) {
        float *own = sums + r * record, *its = scores + r * LANES;
        const vec weights = exp2(load(its) - own[MAXIMUM]);
        store(own + WEIGHTS, load(own + WEIGHTS) + weights);
        Words<T>::store_weights(its, weights * value_scale);
    }
}

// Where the words of a tile's values are: in the cache, to be joined with each load ...
template <typename T>
struct InCache {
    CacheRows<T> value, ahead;  // of this tile, of the next
    void load(int j, int d, vec* x) const { Words<T>::load_values(value.from(j), d, x); }
    void prefetch(int j, int d) const {
        for (int k = 0; k < Words<T>::KEYS; k++) ::prefetch(ahead[j + k] + d);
    }
};
// ... or, where many rows meet the same values, packed once: a line for each word of weights.
template <typename T>
struct PackedValues {
    const float* lines;
    int width;
    void load(int j, int d, vec* x) const {
        for (int p = 0; p < PER_LOAD<T>; p++) x[p] = ::load(lines + j / Words<T>::KEYS * width + d + p * LANES);
    }
    void prefetch(int, int) const {}
};
template <typename T>
static PackedValues<T> pack_values(const InCache<T>& from, int count, int width, float* lines) {
    float* to = lines;
    for (int j = 0; j < count; j += Words<T>::KEYS)
        for (int d = 0; d < width; d += PER_LOAD<T> * LANES) {
            vec x[PER_LOAD<T>];
            from.load(j, d, x);
            from.prefetch(j, d);
            for (int p = 0; p < PER_LOAD<T>; p++, to += LANES) store(to, x[p]);
        }
    return {lines, width};
}

// sums[row] += weights[row] . value, for the vectors from d on: V at a time, then half as many.
template <int R, int V, typename T, typename Values>
INLINE void add_values(const float* weights, Values values, bool ahead, int count, int d, int width, int record,
                       float* sums) {
    constexpr int P = PER_LOAD<T>, KEYS = Words<T>::KEYS;
    for (; d + V * LANES <= width; d += V * LANES) {
        vec sum[R][V], v[V];
        for (int r = 0; r < R; r++)
            for (int i = 0; i < V; i++) sum[r][i] = load(sums + r * record + d + i * LANES);
        for (int j = 0; j < count; j += KEYS) {
            for (int i = 0; i < V; i += P) values.load(j, d + i * LANES, v + i);
            for (int i = 0; i < V && ahead; i += P) values.prefetch(j, d + i * LANES);
            for (int r = 0; r < R; r++) {
                const vec w = all_lanes(weights + r * LANES + j / KEYS);
                for (int i = 0; i < V; i++) sum[r][i] = Words<T>::add(sum[r][i], v[i], w);
            }
        }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < V; i++) store(sums + r * record + d + i * LANES, sum[r][i]);
    }
    if constexpr (V > P) add_values<R, V / 2, T>(weights, values, ahead, count, d, width, record, sums);
}

template <int MOST = SUMS / 4, typename F>
INLINE void for_rows(int r, int rows, F f) {  // from r on: f(how many, the first); the compiler knows how many
    for (; r + MOST <= rows; r += MOST) f(std::integral_constant<int, MOST>{}, r);
    for (; r + 2 <= rows; r += 2) f(std::integral_constant<int, 2>{}, r);
    if (r < rows) f(std::integral_constant<int, 1>{}, r);
}
