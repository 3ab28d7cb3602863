// Lesson 9. What a decoder layer does between its matrices. Everything is float32 from one matrix to the next, and is
// rounded once, when it is written. Functions are called by all threads of a team, which share the rows.

#pragma once
#include "linear.h"

#include <vector>

template <typename T>
static float inverse_rms(const T* x, int64_t n, float eps) {
    vec sum = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec y;
        for (int j = 0; j < LANES; j++) y[j] = widen(x[i + j]);
        sum += y * y;
    }
    float total = fold_lanes(sum, plus)[0];
    for (; i < n; i++) total += widen(x[i]) * widen(x[i]);
    return 1 / std::sqrt(total / float(n) + eps);
}

template <typename T>
static void rms_norm(const Rows<T>& x, const T* weight, float eps, const Rows<T>& out) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < x.count; r++) {
        const T* from = x.at(r);
        T* to = out.at(r);
        const float factor = inverse_rms(from, x.width, eps);
        for (int64_t i = 0; i < x.width; i++) narrow(widen(from[i]) * factor * widen(weight[i]), to + i);
    }
}

// Norm of one query or key head and RoPE, in place: pairs (i, i + D/2) are turned by the token's angles.
template <typename T>
static void norm_and_turn(T* head, const T* weight, const T* cos, const T* sin, int64_t dim, float eps) {
    const float factor = inverse_rms(head, dim, eps);
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = widen(head[i]) * factor * widen(weight[i]);
        const float b = widen(head[i + half]) * factor * widen(weight[i + half]);
        narrow(a * widen(cos[i]) - b * widen(sin[i]), head + i);
        narrow(b * widen(cos[i + half]) + a * widen(sin[i + half]), head + i + half);
    }
}

INLINE vec silu(vec x) {  // x / (1 + e^-x); exp2 wants what is not positive
    const vec size = x < vec{} ? -x : x, e = exp2(size * -1.44269504088896f);
    return x * (x < vec{} ? e : vec{} + 1.f) / (1.f + e);
}
