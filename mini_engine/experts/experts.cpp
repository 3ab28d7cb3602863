// Course machinery. Experts over lesson 9's packed weights: all that follows a layer's mixer, for all rows of a step.
//
//   finish    the mixer's last matrix and the residual, then norm, router, experts and the residual
//   experts   the experts alone, of a process that has a share of them
//
// Choices are sorted by expert, and every expert that was chosen computes down(silu(gate) * up) of its rows. The
// weights of the others are not read. A row's sum is in the order of its own choices; the shared expert's result comes
// last.

#include "../layers/blocks.h"
#include "router.h"

extern "C" {
struct Expert {
    Matrix gate, up, down;
    int64_t width;
};
struct Work {
    const Expert *experts, *shared;        // [count]; the one for all rows, or nullptr
    const int64_t* choices;                // [rows, chosen], from 0; of experts from `count` on, nothing is added
    const float *weights, *shared_weights; // [rows, chosen]; [rows]
    int64_t count, rows, chosen, hidden;
    Place x, out;                          // [rows, hidden]
    Place sorted, active, results;         // a row for each choice, and in the last two for each of the shared expert
    int64_t adds;                          // out += the sums, instead of out = them
};
}

template <typename T>
struct Experts {
    const Work& w;
    std::vector<int64_t> begins, places;  // where each expert's rows begin in `sorted`; each choice's row there, or -1

    explicit Experts(const Work& work) : w(work), begins(w.count + 1), places(w.rows * w.chosen, -1) {}

    static Rows<T> rows(const Place& place, Range r, int64_t width) {
        return {(T*)place.data + r.begin * place.stride, r.size(), width, place.stride};
    }
    Range all() const { return {0, w.rows}; }
    Range of(int64_t e) const { return {begins[e], begins[e + 1]}; }
    Range of_shared() const { return {w.rows * w.chosen, w.rows * (w.chosen + 1)}; }

    void group() {  // find each choice's place; by one thread
        const auto each = [&](auto use) {
            for (size_t i = 0; i < places.size(); i++)
                if (uint64_t(w.choices[i]) < uint64_t(w.count)) use(i, w.choices[i]);
        };
        each([&](size_t, int64_t expert) { begins[expert + 1]++; });
        for (int64_t e = 0; e < w.count; e++) begins[e + 1] += begins[e];
        std::vector<int64_t> next = begins;
        each([&](size_t i, int64_t expert) { places[i] = next[expert]++; });
    }
    void sort() const {  // copy each choice's row to its place
#pragma omp for schedule(static)
        for (int64_t i = 0; i < w.rows * w.chosen; i++) {
            const T* from = (const T*)w.x.data + i / w.chosen * w.x.stride;
            if (places[i] >= 0) std::copy_n(from, w.hidden, (T*)w.sorted.data + places[i] * w.sorted.stride);
        }
    }
    void enter(const Expert& e, const Rows<T>& x, Range r) const {
        gate_and_up(x, e.gate, e.up, rows(w.active, r, e.width));
    }
    void leave(const Expert& e, Range r) const {
        store_linear(rows(w.active, r, e.width), e.down, rows(w.results, r, w.hidden));
    }

    void run() {
#pragma omp single
        group();
        sort();
        for (int64_t e = 0; e < w.count; e++)
            if (of(e).size()) enter(w.experts[e], rows(w.sorted, of(e), w.hidden), of(e));
        if (w.shared) enter(*w.shared, rows(w.x, all(), w.hidden), of_shared());
        barrier();
        for (int64_t e = 0; e < w.count; e++)
            if (of(e).size()) leave(w.experts[e], of(e));
        if (w.shared) leave(*w.shared, of_shared());
        barrier();
#pragma omp for schedule(static)
        for (int64_t row = 0; row < w.rows; row++)
            for (int64_t at = 0; at < w.hidden; at += LANES) add_up(row, at, w.hidden - at);
    }

    void add_up(int64_t row, int64_t at, int64_t left) const {
        const T* results = (const T*)w.results.data + at;
        T* out = (T*)w.out.data + row * w.out.stride + at;
        vec sum = {};
        for (int64_t i = row * w.chosen; i < (row + 1) * w.chosen; i++)
            if (places[i] >= 0) sum += load_some(results + places[i] * w.results.stride, left) * w.weights[i];
        if (w.shared)
            sum += load_some(results + (of_shared().begin + row) * w.results.stride, left) * w.shared_weights[row];
        store_some(out, w.adds ? load_some(out, left) + sum : sum, left);
    }
};

template <typename T>
static void finish(const Half& mixer, const Place& mixed, const Norm& norm, const Router& router, Work w, int threads) {
    std::vector<int64_t> choices(w.rows * w.chosen);
    std::vector<float> weights(choices.size()), shares(w.rows, 1.f), room(w.rows * router.matrix.outputs);
    w.choices = choices.data(), w.weights = weights.data(), w.shared_weights = shares.data();
    Experts<T> experts(w);
    const Rows<T> x = Block<T>::rows(w.out, w.rows, w.hidden), normed = Block<T>::rows(w.x, w.rows, w.hidden);
    const Rows<float> logits{room.data(), w.rows, router.matrix.outputs, router.matrix.outputs};
#pragma omp parallel num_threads(threads)
    {
        Block<T>::add(mixer, w.rows, w.out, mixed, {});
        barrier();
        rms_norm(x, norm.weight, norm.eps, normed);
        barrier();
        store_logits(normed, router, logits);
        barrier();
        Choice choice(router, w.count);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < w.rows; row++) {
            choice.choose<T>(logits.at(row), w.chosen, &choices[row * w.chosen], &weights[row * w.chosen]);
            if (logits.width > w.count) shares[row] = gate_of<T>(logits.at(row)[w.count]);
        }
        experts.run();
    }
}

#define FUNCTIONS(T, NAME)                                                                                          \
    extern "C" void experts_##NAME(const Work* work, int threads) {                                                 \
        Experts<T> experts(*work);                                                                                  \
        _Pragma("omp parallel num_threads(threads)") experts.run();                                                 \
    }                                                                                                               \
    extern "C" void finish_##NAME(const Half* mixer, const Place* mixed, const Norm* norm, const Router* router,    \
                                  const Work* work, int threads) {                                                  \
        finish<T>(*mixer, *mixed, *norm, *router, *work, threads);                                                  \
    }
FUNCTIONS(float, f32)
FUNCTIONS(bf16, bf16)
