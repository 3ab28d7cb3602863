// Course machinery. The experts of a layer over lesson 9's packed weights: all rows of a step in one call.
//
// Choices are sorted by expert, and every expert that was chosen computes down(silu(gate) * up) of its rows. The weights
// of the others are not read. A row's sum is in the order of its own choices; what all rows' expert makes of it comes
// last.

#include "../layers/fused.h"

#include <vector>

extern "C" {
struct Expert {
    Matrix gate, up, down;
    int64_t width;
};
struct Place {  // rows that start `stride` elements apart
    void* data;
    int64_t stride;
};
struct Work {
    const Expert *experts, *shared;        // [count]; all rows', or nullptr
    const int64_t* choices;                // [rows, chosen], from 0; of experts from `count` on, nothing is added
    const float *weights, *shared_weights; // [rows, chosen]; [rows], or nullptr for ones
    int64_t count, rows, chosen, hidden;
    Place x, out;                          // [rows, hidden]
    Place sorted, active, results;         // a row for each choice, and in the last two for each of all rows' expert
    int64_t adds;                          // out += the sums, instead of out = them
};
}

template <typename T>
struct Experts {
    const Work& w;
    std::vector<int64_t> begins, places;  // where each expert's rows begin in `sorted`; each choice's row there, or -1

    explicit Experts(const Work& work) : w(work), begins(w.count + 1), places(w.rows * w.chosen, -1) {
        const auto each = [&](auto use) {
            for (size_t i = 0; i < places.size(); i++)
                if (uint64_t(w.choices[i]) < uint64_t(w.count)) use(i, w.choices[i]);
        };
        each([&](size_t, int64_t expert) { begins[expert + 1]++; });
        for (int64_t e = 0; e < w.count; e++) begins[e + 1] += begins[e];
        std::vector<int64_t> next = begins;
        each([&](size_t i, int64_t expert) { places[i] = next[expert]++; });
    }

    static Rows<T> rows(const Place& place, Range r, int64_t width) {
        return {(T*)place.data + r.begin * place.stride, r.size(), width, place.stride};
    }
    Range all() const { return {0, w.rows}; }
    Range of(int64_t e) const { return {begins[e], begins[e + 1]}; }
    Range of_shared() const { return {w.rows * w.chosen, w.rows * (w.chosen + 1)}; }

    void sort() const {  // copy each choice's row to its place
#pragma omp for schedule(static)
        for (int64_t i = 0; i < w.rows * w.chosen; i++) {
            const T* from = (const T*)w.x.data + i / w.chosen * w.x.stride;
            if (places[i] >= 0) std::copy_n(from, w.hidden, (T*)w.sorted.data + places[i] * w.sorted.stride);
        }
    }
    void enter(const Expert& e, const Rows<T>& x, Range r) const { gate_and_up(x, e.gate, e.up, rows(w.active, r, e.width)); }
    void leave(const Expert& e, Range r) const { store_linear(rows(w.active, r, e.width), e.down, rows(w.results, r, w.hidden)); }

    void run() const {
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
        if (w.shared) {
            const vec its = load_some(results + (of_shared().begin + row) * w.results.stride, left);
            sum += its * (w.shared_weights ? w.shared_weights[row] : 1.f);
        }
        store_some(out, w.adds ? load_some(out, left) + sum : sum, left);
    }
};

#define FUNCTIONS(T, NAME)                                               \
    extern "C" void experts_##NAME(const Work* work, int threads) {      \
        const Experts<T> experts(*work);                                 \
        _Pragma("omp parallel num_threads(threads)") experts.run();      \
    }
FUNCTIONS(float, f32)
FUNCTIONS(bf16, bf16)
