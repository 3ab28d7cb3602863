// Lesson 11. Mixers with a state over lesson 9's packed weights, one call each but for their last matrix.
//
//   delta_net    norm and the joined projection (`enter` of blocks.h), then gdn_step.h
//   short_conv   the same with conv_step.h

#include "../layers/blocks.h"
#include "conv_step.h"
#include "gdn_step.h"

#define FUNCTIONS(T, NAME)                                                                                             \
    extern "C" void delta_net_##NAME(const Entry* entry, const StepSizes* sizes, const Feeds* feeds, int64_t count,    \
                                     const float* weight, void* conv, float* recurrent, const Gates* gates,            \
                                     const Place* result, int threads) {                                               \
        const Place& inner = entry->at.out;                                                                            \
        const DeltaStep<T> step{*sizes,    *gates,    (const T*)inner.data, inner.stride,  weight,                     \
                                (T*)conv, recurrent, (T*)result->data,     result->stride};                           \
        _Pragma("omp parallel num_threads(threads)") {                                                                 \
            Block<T>::enter(*entry);                                                                                   \
            barrier();                                                                                                 \
            step.run(feeds, count);                                                                                    \
        }                                                                                                              \
    }                                                                                                                  \
    extern "C" void short_conv_##NAME(const Entry* entry, const ConvSizes* sizes, const Feeds* feeds, int64_t count,   \
                                      void* state, const Place* result, int threads) {                                 \
        const int64_t rows = entry->at.rows;                                                                           \
        const ConvStep<T> step{*sizes, Block<T>::rows(entry->at.out, rows, 3 * sizes->channels), (T*)state,            \
                               Block<T>::rows(*result, rows, sizes->channels)};                                        \
        _Pragma("omp parallel num_threads(threads)") {                                                                 \
            Block<T>::enter(*entry);                                                                                   \
            barrier();                                                                                                 \
            step.run(feeds, count);                                                                                    \
        }                                                                                                              \
    }
FUNCTIONS(float, f32)
FUNCTIONS(bf16, bf16)
