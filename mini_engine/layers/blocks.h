// Course machinery. What lies around a mixer, over lesson 9's packed weights, for layers that are not one call as a whole:
//
//   enter    norm and the mixer's first matrix; norm and RoPE of its first heads
//   finish   the mixer's last matrix and the residual, then norm, gate and up, activation, down and the residual
//
// A family's layers may norm what they add to x, too. Weights of norms are float32 here: some are stored around 0, and
// 1 + weight has no exact bfloat16.

#pragma once
#include "fused.h"

extern "C" {
struct Place {  // rows that start `stride` elements apart
    void* data;
    int64_t stride;
};
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
    const void *cos, *sin; // [rows, dim]: float32 if has_floats, otherwise of the activations' type
    int64_t has_floats;
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
                const A *cos = (const A*)e.cos + row * e.dim, *sin = (const A*)e.sin + row * e.dim;
                norm_and_rope(out.at(row) + head * e.dim, weight, cos, sin, e.dim, e.head_norm.eps);
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
