// Lesson 9. The operations of a decoder layer between its matrices. They compute in float32; a value is rounded only
// when it is stored. Each function is called by all threads of a team, which divide the work. None of them waits for
// the others at its end: callers say where the team must meet.

#pragma once
#include "linear.h"

template <typename T>
static float inverse_rms(const T* x, int64_t n, float eps) {
    vec sum = {};
    for (int64_t i = 0; i < n; i += LANES) {
        const vec y = load_some(x + i, n - i);
        sum += y * y;
    }
    return 1 / std::sqrt(fold_lanes(sum, plus)[0] / float(n) + eps);
}

template <typename T, typename W>
static void rms_norm(const Rows<T>& x, const W* weight, float eps, const Rows<T>& out) {
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < x.count; r++) {
        const float factor = inverse_rms(x.at(r), x.width, eps);
        for (int64_t i = 0; i < x.width; i += LANES) {
            const int64_t left = x.width - i;
            store_some(out.at(r) + i, load_some(x.at(r) + i, left) * factor * load_some(weight + i, left), left);
        }
    }
}

// Norm and RoPE of one query or key head, in place. Of the first `turned` dimensions, pairs (i, i + turned/2) are
// rotated by the token's angles; the others are only normed. Without a weight there is no norm.
template <typename T, typename W, typename A>
static void norm_and_rope(T* head, const W* weight, const A* cos, const A* sin, int64_t dim, int64_t turned,
                          float eps) {
    const float factor = weight ? inverse_rms(head, dim, eps) : 1;
    const auto normed = [&](int64_t i, int64_t left) {
        const vec x = load_some(head + i, left);
        return weight ? x * factor * load_some(weight + i, left) : x;
    };
    for (int64_t i = 0, j = turned / 2; i < turned / 2; i += LANES, j += LANES) {
        const int64_t left = turned / 2 - i;
        const vec a = normed(i, left), b = normed(j, left);
        store_some(head + i, a * load_some(cos + i, left) - b * load_some(sin + i, left), left);
        store_some(head + j, b * load_some(cos + j, left) + a * load_some(sin + j, left), left);
    }
    for (int64_t i = turned; i < dim; i += LANES) store_some(head + i, normed(i, dim - i), dim - i);
}

INLINE vec times_logistic(vec x, vec y) {  // x / (1 + e^-y); exp2 takes only arguments up to 0
    const vec size = y < vec{} ? -y : y, e = exp2(size * -1.44269504088896f);
    return x * (y < vec{} ? e : vec{} + 1.f) / (1.f + e);
}
INLINE vec silu(vec x) { return times_logistic(x, x); }
INLINE vec gelu(vec x) { return times_logistic(x, x * (1.5957691216f + 0.0713548163f * x * x)); }  // the tanh form

// ---------------------------------------------------------------- matrices with an operation behind them

template <typename T>
static Rows<const T> readable(const Rows<T>& r) {
    return {r.data, r.count, r.width, r.stride};
}

template <typename T>
static void store_linear(const Rows<T>& from, const Matrix& m, const Rows<T>& to) {
    linear(readable(from), m, to, [](T* place, int64_t n, vec sum) { store_some(place, sum, n); });
}

template <typename T>
static void add_linear(const Rows<T>& from, const Matrix& m, const Rows<T>& to) {  // to += from W^T
    linear(readable(from), m, to, [](T* place, int64_t n, vec sum) {
        store_some(place, load_some(place, n) + sum, n);
    });
}

// to = act(gate) * up. A pair of tiles is one of gate's and the matching one of up's, so this needs no second pass.
template <typename T, typename F>
static void gate_and_up(const Rows<T>& from, const Matrix& gate, const Matrix& up, const Rows<T>& to, F act) {
    const int64_t size = TILE * words<T>(from.width);
    const auto tiles_of = [&](int64_t tile, const int32_t** two) {
        two[0] = (const int32_t*)gate.tiles + tile * size;
        two[1] = (const int32_t*)up.tiles + tile * size;
    };
    const auto write_rows = [&](int64_t first, int rows, int64_t tile, const float* sums) {
        for (int r = 0; r < rows; r++, sums += 2 * TILE)
            for (int i = 0; i < TILE; i += LANES) {
                const int64_t at = tile * TILE + i, count = to.width - at;
                const vec active = act(load(sums + i)) * load(sums + TILE + i);
                if (count > 0) store_some(to.at(first + r) + at, active, count);
            }
    };
    each_pair(readable(from), (to.width + TILE - 1) / TILE, tiles_of, to, TILE, write_rows);
}
template <typename T>
static void gate_and_up(const Rows<T>& from, const Matrix& gate, const Matrix& up, const Rows<T>& to) {
    gate_and_up(from, gate, up, to, [](vec x) { return silu(x); });
}
