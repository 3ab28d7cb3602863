// Lesson 9. The operations of a decoder layer between its matrices. They compute in float32; a value is rounded only when
// it is stored. Each function is called by all threads of a team, which divide the rows among themselves.

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

template <typename T>
static void rms_norm(const Rows<T>& x, const T* weight, float eps, const Rows<T>& out) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < x.count; r++) {
        const float factor = inverse_rms(x.at(r), x.width, eps);
        for (int64_t i = 0; i < x.width; i += LANES) {
            const int64_t left = x.width - i;
            store_some(out.at(r) + i, load_some(x.at(r) + i, left) * factor * load_some(weight + i, left), left);
        }
    }
}

// Norm and RoPE of one query or key head, in place: pairs (i, i + D/2) are rotated by the token's angles.
template <typename T>
static void norm_and_rope(T* head, const T* weight, const T* cos, const T* sin, int64_t dim, float eps) {
    const float factor = inverse_rms(head, dim, eps);
    for (int64_t i = 0, j = dim / 2; i < dim / 2; i += LANES, j += LANES) {
        const int64_t left = dim / 2 - i;
        const vec a = load_some(head + i, left) * factor * load_some(weight + i, left);
        const vec b = load_some(head + j, left) * factor * load_some(weight + j, left);
        store_some(head + i, a * load_some(cos + i, left) - b * load_some(sin + i, left), left);
        store_some(head + j, b * load_some(cos + j, left) + a * load_some(sin + j, left), left);
    }
}

INLINE vec silu(vec x) {  // x / (1 + e^-x); exp2 takes only arguments up to 0
    const vec size = x < vec{} ? -x : x, e = exp2(size * -1.44269504088896f);
    return x * (x < vec{} ? e : vec{} + 1.f) / (1.f + e);
}
