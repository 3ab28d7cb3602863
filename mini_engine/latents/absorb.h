// Lesson 16. The products around attention over latents as their callers see them: absorb.py, and mixer.cpp.

#pragma once
#include <cstdint>

extern "C" {
struct HeadsProduct {  // absorb.py has the same struct
    const void *x, *w;
    void* out;  // [rows, heads, outputs], contiguous
    int64_t rows, heads, inputs, outputs;
    int64_t x_stride, x_head_stride, w_head_stride;  // elements from one row or head to the next
};
typedef void MultiplyHeads(const HeadsProduct* product, int threads);
}
