// Course machinery. The functions of blocks.h, for float and for bfloat16.

#include "blocks.h"

extern "C" int bad_table(const Pool* pool, int layers) { return bad_table(*pool, layers); }  // see pool.h

#define FUNCTIONS(T, NAME)                                                                                           \
    extern "C" void enter_##NAME(const Entry* entry, int threads) {                                                  \
        _Pragma("omp parallel num_threads(threads)") Block<T>::enter(*entry);                                        \
    }                                                                                                                \
    extern "C" void mix_##NAME(const Entry* entry, const Mixer* mixer, const Pool* pool, const Place* result,        \
                               int threads) {                                                                        \
        Block<T>::mix(*entry, *mixer, *pool, *result, threads);                                                      \
    }                                                                                                                \
    extern "C" void finish_##NAME(const Finish* layer, const FinishRows* rows, const Place* mixed, int threads) {    \
        _Pragma("omp parallel num_threads(threads)") Block<T>::finish(*layer, *rows, *mixed);                        \
    }
FUNCTIONS(float, f32)
FUNCTIONS(bf16, bf16)
