// Course machinery. The experts of a layer over lesson 9's packed weights: all rows of a step in one call.
//
// Rows are sorted by expert; those of expert e begin at ends[e - 1] and end at ends[e]. Every expert that has rows
// computes down(silu(gate) * up) of them. The weights of the others are not read.

#include "../layers/fused.h"

extern "C" {
struct Expert {
    Matrix gate, up, down;
};
struct Work {
    const Expert* experts;
    const int64_t* ends;  // [count]
    int64_t count, hidden, width;
    void *x, *activated, *results;  // [N, ...]: hidden, width, hidden
    int64_t x_stride, activated_stride, results_stride;
};
}

template <typename T>
struct Experts {
    const Work& work;

    Rows<T> rows(void* data, int64_t width, int64_t stride, int64_t expert) const {
        const int64_t begin = expert ? work.ends[expert - 1] : 0;
        return {(T*)data + begin * stride, work.ends[expert] - begin, width, stride};
    }
    Rows<T> x(int64_t e) const { return rows(work.x, work.hidden, work.x_stride, e); }
    Rows<T> activated(int64_t e) const { return rows(work.activated, work.width, work.activated_stride, e); }
    Rows<T> results(int64_t e) const { return rows(work.results, work.hidden, work.results_stride, e); }

    void run() const {
        for (int64_t e = 0; e < work.count; e++)
            if (x(e).count) gate_and_up(x(e), work.experts[e].gate, work.experts[e].up, activated(e));
        barrier();
        for (int64_t e = 0; e < work.count; e++)
            if (x(e).count) store_linear(activated(e), work.experts[e].down, results(e));
    }
};

#define FUNCTIONS(T, NAME)                                               \
    extern "C" void experts_##NAME(const Work* work, int threads) {      \
        const Experts<T> experts{*work};                                 \
        _Pragma("omp parallel num_threads(threads)") experts.run();      \
    }
FUNCTIONS(float, f32)
FUNCTIONS(bf16, bf16)
