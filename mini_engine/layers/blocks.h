// Course machinery. What lies around a mixer, over lesson 9's packed weights, for layers that are not one call as a
// whole:
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
struct EntryRows {
    int64_t rows;
    Place x, normed, out;  // [rows, ...]: hidden, hidden, the matrix's outputs
};
struct Angles {
    int64_t turned;         // of a head's dimensions, the first ones are rotated
    const void *cos, *sin;  // [rows, turned]: float32 if has_floats, otherwise of the activations' type
    int64_t has_floats;
};
struct Entry {
    EntryRows at;
    Angles angles;
    int64_t hidden;
    Norm norm;
    Matrix matrix;
    int64_t heads, dim;  // of the outputs, these are normed and rotated
    Norm head_norm;      // [heads, dim]
};
struct Mixer {  // an entry's outputs are q, k, v and gates: the result is multiplied by the gates' logistic
    Heads heads;
    int64_t gates;  // of each head: 0, 1, or its dim
    int64_t layer;  // of the pool
};
struct Half {  // x += after(matrix(from))
    int64_t hidden, width;
    Norm after;
    Matrix matrix;
};
struct Finish {
    Half mixer, last;
    Norm norm;
    Matrix gate, up;
    int64_t has_gelu;
};
struct FinishRows {
    int64_t rows;
    Place x, normed, active, delta;  // [rows, ...]: hidden, hidden, width of `last`, hidden; delta for a norm behind
};
}

template <typename T>
struct Block {
    static Rows<T> rows(const Place& place, int64_t count, int64_t width) {
        return {(T*)place.data, count, width, place.stride};
    }

    template <typename A>
    static void finish_heads(const Entry& e, const Rows<T>& out) {
        const Angles& a = e.angles;
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < out.count; row++)
            for (int64_t head = 0; head < e.heads; head++) {
                const float* weight = e.head_norm.weight ? e.head_norm.weight + head * e.dim : nullptr;
                const A *cos = (const A*)a.cos + row * a.turned, *sin = (const A*)a.sin + row * a.turned;
                norm_and_rope(out.at(row) + head * e.dim, weight, cos, sin, e.dim, a.turned, e.head_norm.eps);
            }
    }

    static void enter(const Entry& e) {
        const EntryRows& at = e.at;
        const Rows<T> normed = rows(at.normed, at.rows, e.hidden), out = rows(at.out, at.rows, e.matrix.outputs);
        rms_norm(rows(at.x, at.rows, e.hidden), e.norm.weight, e.norm.eps, normed);
        barrier();
        store_linear(normed, e.matrix, out);
        if (!e.heads) return;
        barrier();
        e.angles.has_floats ? finish_heads<float>(e, out) : finish_heads<T>(e, out);
    }

    static void mix(const Entry& e, const Mixer& m, const Pool& pool, const Place& result, int threads) {
        const Heads& n = m.heads;
        const Cache& cache = pool.caches[m.layer];
        const int64_t count = e.at.rows;
        const Rows<T> out = rows(e.at.out, count, e.matrix.outputs), mixed = rows(result, count, n.heads * n.dim);
#pragma omp parallel num_threads(threads)
        {
            enter(e);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < count; row++)  // by the thread that has finished its heads
                write_token(pool, cache, n, row, out.at(row) + n.heads * n.dim);
        }
        attend(pool, cache, n, count, e.at.out, result, threads);
        if (!m.gates) return;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
        for (int64_t row = 0; row < count; row++)
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

    static void add(const Half& h, int64_t count, const Place& to, const Place& source, const Place& room) {
        const Rows<T> x = rows(to, count, h.hidden), from = rows(source, count, h.width);
        if (!h.after.weight) return add_linear(from, h.matrix, x);
        const Rows<T> delta = rows(room, count, h.hidden);
        store_linear(from, h.matrix, delta);
        barrier();
        rms_norm(delta, h.after.weight, h.after.eps, delta);  // by the thread that adds the row, too
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < count; row++)
            for (int64_t i = 0; i < h.hidden; i += LANES) {
                const int64_t left = h.hidden - i;
                store_some(x.at(row) + i, load_some(x.at(row) + i, left) + load_some(delta.at(row) + i, left), left);
            }
    }

    static void finish(const Finish& f, const FinishRows& at, const Place& mixed) {
        add(f.mixer, at.rows, at.x, mixed, at.delta);
        barrier();
        const Rows<T> normed = rows(at.normed, at.rows, f.last.hidden), active = rows(at.active, at.rows, f.last.width);
        rms_norm(rows(at.x, at.rows, f.last.hidden), f.norm.weight, f.norm.eps, normed);
        barrier();
        if (f.has_gelu)
            gate_and_up(normed, f.gate, f.up, active, [](vec x) { return gelu(x); });
        else
            gate_and_up(normed, f.gate, f.up, active);
        barrier();
        add(f.last, at.rows, at.x, at.active, at.delta);
    }
};
