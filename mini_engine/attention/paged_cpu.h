// Lesson 3. The C++ kernel as its callers see it: attention/cpu.py from Python, and lesson 9's layers.cpp.

#pragma once
#include <cstdint>

extern "C" {
struct AttentionSizes {  // of one call; attention/cpu.py has the same struct
    int64_t num_seqs, num_rows, heads, kv_heads, dim;
    int64_t num_blocks, block_size, max_blocks;
    int64_t q_stride, out_stride;  // elements from one row to the next
};

// Returns -1, or the sequence whose block table names a block that does not exist; then nothing was written.
typedef int PagedAttention(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                           const int32_t* kv_lens, const int32_t* table, const AttentionSizes* sizes, float scale,
                           int threads);
PagedAttention paged_attention_f32, paged_attention_bf16;
}
