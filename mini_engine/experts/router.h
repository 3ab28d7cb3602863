// Course machinery. Routers in C++: which experts a row is sent to, and what weight each answer has.
//
// A row's logits become scores, probabilities or sigmoids. A bias counts for the choice, not for the weights. Where
// experts form groups, a row's experts come from its best ones; a group is as good as its best experts together. A row
// is the work of one thread.

#pragma once
#include "../layers/fused.h"

extern "C" {
struct Router {  // what router.py's Rules say
    Matrix matrix;      // the logits of all experts, then that of the shared one's gate, if it has a gate
    const float* bias;  // [experts], or nullptr
    int64_t has_sigmoids, normalizes, rounds;
    int64_t groups, kept, judges;
    float epsilon, scale;
};
}

template <typename T>
INLINE float as_stored(float x) {
    T y;
    narrow(x, &y);
    return widen(y);
}

template <typename T>
static void store_logits(const Rows<T>& x, const Router& r, const Rows<float>& logits) {
    linear(readable(x), r.matrix, logits, [&](float* place, int64_t n, vec sum) {
        store_some(place, sum, n);
        for (int64_t i = 0; r.rounds && i < std::min<int64_t>(n, LANES); i++) place[i] = as_stored<T>(place[i]);
    });
}

static void to_scores(const Router& r, float* row, int64_t count) {
    const float most = *std::max_element(row, row + count);
    vec sum = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const vec x = load_some(row + i, count - i);
        const vec score = r.has_sigmoids ? times_logistic(vec{} + 1.f, x) : exp2((x - most) * 1.44269504088896f);
        store_some(row + i, score, count - i);
        sum += load_some(row + i, count - i);
    }
    const float total = r.has_sigmoids ? 1 : fold_lanes(sum, plus)[0];
    for (int64_t i = 0; i < count; i++) row[i] /= total;
}

// The places of the k greatest numbers, in descending order; of equal ones, the first comes first.
static void find_best(const float* x, int64_t count, int64_t k, int64_t* best) {
    for (int64_t i = 0, found = 0; i < count; i++) {
        if (found == k && !(x[i] > x[best[k - 1]])) continue;
        int64_t at = found < k ? found++ : k - 1;
        for (; at > 0 && x[i] > x[best[at - 1]]; at--) best[at] = best[at - 1];
        best[at] = i;
    }
}

struct Choice {  // a thread's room
    const Router& r;
    int64_t count;
    std::vector<float> wanted, worth;
    std::vector<int64_t> best;

    Choice(const Router& router, int64_t experts)
        : r(router), count(experts), wanted(experts), worth(r.groups), best(std::max(r.groups, r.judges)) {}

    void close_groups() {  // nothing outside the best ones is wanted
        const int64_t size = count / r.groups;
        for (int64_t g = 0; g < r.groups; g++) {
            const float* its = wanted.data() + g * size;
            find_best(its, size, r.judges, best.data());
            worth[g] = 0;
            for (int64_t i = 0; i < r.judges; i++) worth[g] += its[best[i]];
        }
        find_best(worth.data(), r.groups, r.groups, best.data());
        for (int64_t i = r.kept; i < r.groups; i++) std::fill_n(wanted.begin() + best[i] * size, size, -INFINITY);
    }

    template <typename T>
    void choose(float* row, int64_t k, int64_t* experts, float* weights) {  // row: logits, which become scores
        to_scores(r, row, count);
        for (int64_t i = 0; i < count; i++) wanted[i] = row[i] + (r.bias ? r.bias[i] : 0);
        if (r.kept < r.groups) close_groups();
        find_best(wanted.data(), count, k, experts);
        float total = 0;
        for (int64_t i = 0; i < k; i++) total += row[experts[i]];
        for (int64_t i = 0; i < k; i++) {
            const float weight = (r.normalizes ? row[experts[i]] / (total + r.epsilon) : row[experts[i]]) * r.scale;
            weights[i] = r.rounds ? as_stored<T>(weight) : weight;
        }
    }
};

template <typename T>
static float gate_of(float logit) {  // rounded as by layers that store each result
    return as_stored<T>(times_logistic(vec{} + 1.f, vec{} + as_stored<T>(logit))[0]);
}
