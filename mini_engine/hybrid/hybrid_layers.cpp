// Lesson 11. Halves of a hybrid's layers over lesson 9's packed weights, one call each: x += last(f(first(norm(x)))).
//
//   feed_forward   norm, gate and up, SiLU, down and the residual
//   delta_net      norm, the joined projection, `gdn_step.h`, the output matrix and the residual
//
// A norm's weight is float32 here: it is stored around 0, and 1 + weight has no exact bfloat16.

#include "gdn_step.h"

extern "C" {
struct Half {
    int64_t tokens, hidden;
    void *x, *normed, *inner, *result;  // [tokens, ...]: hidden, hidden, outputs of `first`, inputs of `last`
    int64_t x_stride, normed_stride, inner_stride, result_stride;
    const float* norm;                  // [hidden], 1 + weight
    float eps;
    Matrix first, second, last;         // only feed-forward has a second: up
    int64_t width;                      // inputs of `last`
};
}

template <typename T>
struct HalfLayer {
    const Half& half;

    Rows<T> x() const { return {(T*)half.x, half.tokens, half.hidden, half.x_stride}; }
    Rows<T> normed() const { return {(T*)half.normed, half.tokens, half.hidden, half.normed_stride}; }
    Rows<T> inner() const { return {(T*)half.inner, half.tokens, half.first.outputs, half.inner_stride}; }
    Rows<T> result() const { return {(T*)half.result, half.tokens, half.width, half.result_stride}; }

    void feed_forward() const {
        rms_norm(x(), half.norm, half.eps, normed());
        barrier();
        gate_and_up(normed(), half.first, half.second, result());
        barrier();
        add_linear(result(), half.last, x());
    }

    void delta_net(const DeltaStep<T>& step, const Feeds* feeds, int64_t count) const {
        rms_norm(x(), half.norm, half.eps, normed());
        barrier();
        store_linear(normed(), half.first, inner());
        barrier();
        step.run(feeds, count);
        add_linear(result(), half.last, x());
    }
};

#define FUNCTIONS(T, NAME)                                                                                             \
    extern "C" void gdn_step_##NAME(const StepSizes* sizes, const Feeds* feeds, int64_t count, const void* qkv,        \
                                    int64_t stride, const float* g, const float* beta, const float* weight,            \
                                    void* conv, float* recurrent, void* out, int threads) {                            \
        const int64_t width = sizes->value_heads * sizes->value_dim;                                                   \
        const DeltaStep<T> step{*sizes, (const T*)qkv, stride,  g,     beta,  weight,                                  \
                                (T*)conv, recurrent,   (T*)out, width, nullptr};                                       \
        _Pragma("omp parallel num_threads(threads)") step.run(feeds, count);                                           \
    }                                                                                                                  \
    extern "C" void delta_net_##NAME(const Half* half, const StepSizes* sizes, const Feeds* feeds, int64_t count,      \
                                     const float* weight, void* conv, float* recurrent, const Gates* gates,            \
                                     int threads) {                                                                    \
        const DeltaStep<T> step{*sizes, (const T*)half->inner, half->inner_stride, nullptr, nullptr, weight,           \
                                (T*)conv, recurrent, (T*)half->result, half->result_stride, gates};                    \
        const HalfLayer<T> layer{*half};                                                                               \
        _Pragma("omp parallel num_threads(threads)") layer.delta_net(step, feeds, count);                              \
    }                                                                                                                  \
    extern "C" void feed_forward_##NAME(const Half* half, int threads) {                                               \
        const HalfLayer<T> layer{*half};                                                                               \
        _Pragma("omp parallel num_threads(threads)") layer.feed_forward();                                             \
    }
FUNCTIONS(float, f32)
FUNCTIONS(bf16, bf16)
