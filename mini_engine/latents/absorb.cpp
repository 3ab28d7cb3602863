// Lesson 16. What surrounds attention over latents: queries absorb W_UK before it, and W_UV is applied to its sums.
//
//   to_latents     out[t, h, r] = sum over n of x[t, h, n] * w[h, n, r]      W_UK's rows, added up
//   from_latents   out[t, h, v] = sum over r of x[t, h, r] * w[h, v, r]      W_UV's rows, each a dot product
//
// The matrices are kv_b as it was stored, which lesson 16's other way reads, too. The order of a sum depends on its
// length alone, whatever other rows there are.

#include "absorb.h"

#include "../attention/vectors.h"

#include <vector>

constexpr int ROWS = 4, LOADS = 2;   // sums that are in registers together
constexpr int64_t LINES_AHEAD = 8;   // of W, from the one a single row meets to the one to prefetch

template <typename T>
constexpr int64_t WIDE = LANES * PER_LOAD<T>;  // elements of a load

template <typename T>
INLINE ivec load_words(const T* p, int64_t count) {  // elements past the count become 0
    ivec words = {};
    if (count >= WIDE<T>)
        memcpy(&words, p, sizeof words);
    else if (count > 0)
        memcpy(&words, p, count * sizeof(T));
    return words;
}

// Words of PER_LOAD inputs, for lanes of outputs: of two rows of W, first the even outputs' pairs, then the odd ones'.
INLINE void pair_up(const ivec* rows, ivec* words, float) { words[0] = rows[0]; }
INLINE void pair_up(const ivec* rows, ivec* words, bf16) {
    words[0] = (rows[0] & 0xffff) | (rows[1] << 16);
    words[1] = (ivec)((uvec)rows[0] >> 16) | (rows[1] & int32_t(0xffff0000));
}
INLINE vec add_product(vec sum, ivec w, ivec x, float) { return sum + (vec)w * (vec)x; }
INLINE vec add_product(vec sum, ivec w, ivec x, bf16) { return add_pairs(sum, w, x); }

template <typename T>
struct Product {
    const HeadsProduct& p;

    const T* x(int64_t row, int64_t head) const { return (const T*)p.x + row * p.x_stride + head * p.x_head_stride; }
    const T* w(int64_t head) const { return (const T*)p.w + head * p.w_head_stride; }
    T* out(int64_t row, int64_t head) const { return (T*)p.out + (row * p.heads + head) * p.outputs; }

    // Outputs begin ... of a head, for all rows. Its lines lie a power of two apart, where they evict each other from
    // the cache: they are copied once, in pairs.
    void add_lines(int64_t head, int64_t begin, std::vector<ivec>& room) const {
        constexpr int P = PER_LOAD<T>;
        ivec* words = room.data();
        for (int64_t n = 0; n < p.inputs; n += P)
            for (int l = 0; l < LOADS; l++, words += P) {
                const int64_t left = p.outputs - begin - l * WIDE<T>;
                ivec lines[P];
                for (int i = 0; i < P; i++)
                    lines[i] =
                        load_words(w(head) + (n + i) * p.outputs + p.outputs - left, n + i < p.inputs ? left : 0);
                pair_up(lines, words, T{});
            }
        int64_t row = 0;
        for (; row + ROWS <= p.rows; row += ROWS) add_rows<ROWS>(head, row, begin, room.data());
        for (; row < p.rows; row++) add_rows<1>(head, row, begin, room.data());
    }

    template <int R>
    void add_rows(int64_t head, int64_t row, int64_t begin, const ivec* words) const {
        constexpr int P = PER_LOAD<T>, V = LOADS * P;
        vec sum[R][V] = {};
        for (int64_t n = 0; n < p.inputs; n += P, words += V)
            UNROLL for (int r = 0; r < R; r++) {
                int32_t its = 0;
                const T* from = x(row + r, head) + n;
                n + P <= p.inputs ? memcpy(&its, from, P * sizeof(T)) : memcpy(&its, from, sizeof(T));
                UNROLL for (int v = 0; v < V; v++) sum[r][v] = add_product(sum[r][v], words[v], ivec{} + its, T{});
            }
        for (int r = 0; r < R; r++) write_sums<LOADS>(head, row + r, begin, sum[r]);
    }

    template <int L>
    void write_sums(int64_t head, int64_t row, int64_t begin, const vec* sum) const {
        for (int l = 0; l < L; l++) {
            const int64_t at = begin + l * WIDE<T>, count = std::min<int64_t>(WIDE<T>, p.outputs - at);
            T joined[WIDE<T>];
            store_joined(joined, sum + l * PER_LOAD<T>);
            if (count > 0) std::copy(joined, joined + count, out(row, head) + at);
        }
    }

    // A single row waits for W alone: its lines are read as they lie, long parts of them, and some way ahead.
    static constexpr int ALONE = SUMS / PER_LOAD<T>;  // loads of a part, whose sums fit the registers
    void add_alone(int64_t head, int64_t begin, const T* next) const {
        constexpr int P = PER_LOAD<T>;
        const T *lines = w(head) + begin, *row = x(0, head);
        vec sum[SUMS] = {};
        for (int64_t n = 0; n < p.inputs; n += P) {
            int32_t its = 0;
            n + P <= p.inputs ? memcpy(&its, row + n, P * sizeof(T)) : memcpy(&its, row + n, sizeof(T));
            const int64_t far = n + LINES_AHEAD - p.inputs;
            const T* ahead = far < 0 ? lines + (n + LINES_AHEAD) * p.outputs : next + far * p.outputs;
            UNROLL for (int l = 0; l < ALONE; l++) {
                const int64_t at = l * WIDE<T>, left = p.outputs - begin - at;
                ivec two[P], words[P];
                for (int i = 0; i < P; i++) {
                    two[i] = load_words(lines + (n + i) * p.outputs + at, n + i < p.inputs ? left : 0);
                    prefetch(ahead + i * p.outputs + at);
                }
                pair_up(two, words, T{});
                for (int i = 0; i < P; i++) sum[l * P + i] = add_product(sum[l * P + i], words[i], ivec{} + its, T{});
            }
        }
        write_sums<ALONE>(head, 0, begin, sum);
    }

    // Outputs begin ... begin + LANES - 1 of a row; the first row prefetches the lines that it needs next.
    void dots(int64_t head, int64_t row, int64_t begin, const T* next) const {
        const int64_t count = std::min<int64_t>(LANES, p.outputs - begin);
        vec sum[LANES] = {};
        for (int64_t n = 0; n < p.inputs; n += WIDE<T>) {
            const ivec its = load_words(x(row, head) + n, p.inputs - n);
            UNROLL for (int64_t i = 0; i < LANES; i++) {
                const int64_t output = begin + std::min(i, count - 1);
                if (!row) prefetch(next + i * p.inputs + n);
                sum[i] = add_product(sum[i], load_words(w(head) + output * p.inputs + n, p.inputs - n), its, T{});
            }
        }
        const vec all = sum_each(sum);
        T* to = out(row, head) + begin;
        if (count == LANES) return store(to, all);
        for (int64_t i = 0; i < count; i++) narrow(all[i], to + i);
    }

    // Where task i begins, if each head has `pieces`. Threads take contiguous parts: the next task is mostly their own.
    const T* place(int64_t task, int64_t pieces, int64_t size) const {
        return w(task / pieces) + task % pieces * size;
    }

    void to_latents(int threads) const {
        const int64_t size = (p.rows == 1 ? ALONE : LOADS) * WIDE<T>, pieces = (p.outputs + size - 1) / size;
#pragma omp parallel num_threads(threads)
        {
            std::vector<ivec> room(p.rows == 1 ? 0 : (p.inputs + 1) * LOADS * PER_LOAD<T>);
#pragma omp for schedule(static)
            for (int64_t task = 0; task < p.heads * pieces; task++)
                if (p.rows == 1)
                    add_alone(task / pieces, task % pieces * size, place(task + 1, pieces, size));
                else
                    add_lines(task / pieces, task % pieces * size, room);
        }
    }

    void from_latents(int threads) const {
        const int64_t pieces = (p.outputs + LANES - 1) / LANES;
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t task = 0; task < p.heads * pieces; task++)
            for (int64_t row = 0; row < p.rows; row++)
                dots(task / pieces, row, task % pieces * LANES, place(task + 1, pieces, LANES * p.inputs));
    }
};

#define FUNCTIONS(T, NAME)                                                                                       \
    extern "C" void to_latents_##NAME(const HeadsProduct* p, int threads) { Product<T>{*p}.to_latents(threads); } \
    extern "C" void from_latents_##NAME(const HeadsProduct* p, int threads) { Product<T>{*p}.from_latents(threads); }
FUNCTIONS(float, f32)
FUNCTIONS(bf16, bf16)
