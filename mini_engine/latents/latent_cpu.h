// Lesson 16. The C++ kernel over latents as latents/cpu.py sees it.

#pragma once
#include <cstdint>

extern "C" {
struct LatentSizes {  // of one call; latents/cpu.py has the same struct
    int64_t num_seqs, num_rows, heads, rank, rope;
    int64_t num_blocks, block_size, max_blocks;
    int64_t q_stride, q_head_stride;        // elements from one row to the next, and from one head to the next
    int64_t rope_stride, rope_head_stride;  // of q_rope
};

// Returns -1, or the sequence whose block table names a block that does not exist; then nothing was written.
typedef int LatentPagedAttention(const void* q, const void* q_rope, const void* c, const void* r, void* out,
                                 const int32_t* starts, const int32_t* kv_lens, const int32_t* table,
                                 const LatentSizes* sizes, float scale, int threads);
LatentPagedAttention latent_attention_f32, latent_attention_bf16;
}
