// Course machinery. What lies around a mixer, over lesson 9's packed weights, for layers that are not one call as a whole:
//
//   enter    norm and the mixer's first matrix; norm and RoPE of its first heads
//   mix      the same, then K and V into their slots, attention, and its gates: all of a mixer but its last matrix
//   finish   the mixer's last matrix and the residual, then norm, gate and up, activation, down and the residual
//
// A family's layers may norm what they add to x, too. Weights of norms are float32 here: some are stored around 0, and
// 1 + weight has no exact bfloat16.

#pragma once
#include "fused.h"
#include "pool.h"

extern "C" {
struct Norm {
    const float* weight;  // nullptr: there is no norm
    float eps;
};
struct Entry {
    int64_t rows, hidden;
    Place x, normed, out;  // [rows, ...]: hidden, hidden, the matrix's outputs
    Norm norm;
    Matrix matrix;
    int64_t heads, dim;    // of the outputs, these are normed and rotated
    Norm head_norm;        // [heads, dim]
    int64_t turned;        // of a head's dimensions, the first ones are rotated
    const void *cos, *sin; // [rows, turned]: float32 if has_floats, otherwise of the activations' type
    int64_t has_floats;
};
struct Mixer {  // an entry's outputs are q, k, v and gates: the result is multiplied by the gates' logistic
    Heads heads;
    int64_t gates;  // of each head: 0, 1, or its dim
    int64_t layer;  // of the pool
};
struct Half {  // x += after(matrix(from))
    int64_t rows, hidden, width;
    Place x, from, delta;  // [rows, ...]: hidden, width, hidden; delta is used where there is a norm
    Norm after;
    Matrix matrix;
};
struct FeedForward {  // its result is the `from` of a half
    Place normed;
    Norm norm;
    Matrix gate, up;
    int64_t has_gelu;
};
}

template <typename T>
struct Block {
    static Rows<T> rows(const Place& place, int64_t count, int64_t width) {
        return {(T*)place.data, count, width, place.stride};
    }

    template <typename A>
    static void finish_heads(const Entry& e, const Rows<T>& out) {
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < e.rows; row++)
            for (int64_t head = 0; head < e.heads; head++) {
                const float* weight = e.head_norm.weight ? e.head_norm.weight + head * e.dim : nullptr;
                const A *cos = (const A*)e.cos + row * e.turned, *sin = (const A*)e.sin + row * e.turned;
                norm_and_rope(out.at(row) + head * e.dim, weight, cos, sin, e.dim, e.turned, e.head_norm.eps);
            }
    }

    static void enter(const Entry& e) {
        const Rows<T> normed = rows(e.normed, e.rows, e.hidden), out = rows(e.out, e.rows, e.matrix.outputs);
        rms_norm(rows(e.x, e.rows, e.hidden), e.norm.weight, e.norm.eps, normed);
        barrier();
        store_linear(normed, e.matrix, out);
        if (!e.heads) return;
        barrier();
        e.has_floats ? finish_heads<float>(e, out) : finish_heads<T>(e, out);
    }

    static void mix(const Entry& e, const Mixer& m, const Pool& pool, const Place& result, int threads) {
        const Heads& n = m.heads;
        const Cache& cache = pool.caches[m.layer];
        const Rows<T> out = rows(e.out, e.rows, e.matrix.outputs), mixed = rows(result, e.rows, n.heads * n.dim);
#pragma omp parallel num_threads(threads)
        {
            enter(e);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < e.rows; row++)  // by the thread that has finished its heads
                write_token(pool, cache, n, row, out.at(row) + n.heads * n.dim);
        }
        attend(pool, cache, n, e.rows, e.out, result, threads);
        if (!m.gates) return;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
        for (int64_t row = 0; row < e.rows; row++)
            for (int64_t head = 0; head < n.heads; head++) {
                const T* gates = out.at(row) + (n.heads + 2 * n.kv_heads) * n.dim + head * m.gates;
                apply_gates(mixed.at(row) + head * n.dim, n.dim, gates, m.gates);
            }
    }

    static void apply_gates(T* head, int64_t dim, const T* gates, int64_t count) {
        for (int64_t i = 0; i < dim; i += LANES) {
            const int64_t left = dim - i;
            const vec gate = count == 1 ? vec{} + widen(*gates) : load_some(gates + i, left);
            store_some(head + i, times_logistic(load_some(head + i, left), gate), left);
        }
    }

    static void add(const Half& h) {
        const Rows<T> x = rows(h.x, h.rows, h.hidden), from = rows(h.from, h.rows, h.width);
        if (!h.after.weight) return add_linear(from, h.matrix, x);
        const Rows<T> delta = rows(h.delta, h.rows, h.hidden);
        store_linear(from, h.matrix, delta);
        barrier();
        rms_norm(delta, h.after.weight, h.after.eps, delta);  // by the thread that adds the row, too
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < h.rows; row++)
            for (int64_t i = 0; i < h.hidden; i += LANES) {
                const int64_t left = h.hidden - i;
                store_some(x.at(row) + i, load_some(x.at(row) + i, left) + load_some(delta.at(row) + i, left), left);
            }
    }

    static void finish(const Half& mixer, const FeedForward& f, const Half& last) {
        add(mixer);
        barrier();
        const Rows<T> normed = rows(f.normed, last.rows, last.hidden), active = rows(last.from, last.rows, last.width);
        rms_norm(rows(last.x, last.rows, last.hidden), f.norm.weight, f.norm.eps, normed);
        barrier();
        if (f.has_gelu)
            gate_and_up(normed, f.gate, f.up, active, [](vec x) { return gelu(x); });
        else
            gate_and_up(normed, f.gate, f.up, active);
        barrier();
        add(last);
    }
};
