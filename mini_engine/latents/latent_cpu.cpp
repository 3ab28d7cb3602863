// Lesson 16. Attention over latents for processors, for caches that hold what the queries hold. latent_tasks.h has it
// all.

#include "latent_tasks.h"

#define KERNEL(NAME, T, C)                                                                                             \
    int NAME(const void* q, const void* q_rope, const void* c, const void* r, void* out, const int32_t* starts,        \
             const int32_t* kv_lens, const int32_t* table, const LatentSizes* sizes, float scale, int threads) {       \
        return run<T, C>(q, q_rope, c, r, out, starts, kv_lens, table, *sizes, scale, threads);                        \
    }
KERNEL(latent_attention_f32, float, float)
KERNEL(latent_attention_bf16, bf16, bf16)
