// Lesson 17. Lesson 16's attention over latents, for caches of rows. Its tiles hold floats, whatever the cache holds.

#include "../latents/latent_tasks.h"
#include "int4_rows.h"

struct Int4Row {
    uint8_t bits;
};

template <>
struct Row<int8_t> {
    static int64_t size(int64_t dim) { return (dim + 3) / 4 * 4 + 4; }
    static void read(const int8_t* row, int dim, float* to) {
        float scale;
        memcpy(&scale, row + size(dim) - 4, 4);
        for (int d = 0; d < dim; d++) to[d] = float(row[d]) * scale;
    }
};

template <>
struct Row<Int4Row> {
    static int64_t size(int64_t dim) { return code_bytes(int(dim)) + 4 * num_groups(int(dim)); }
    static void read(const Int4Row* row, int dim, float* to) { open_row(&row->bits, dim, to); }
};

extern "C" LatentPagedAttention latent_attention_int8_f32, latent_attention_int8_bf16, latent_attention_int4_f32,
    latent_attention_int4_bf16;

#define KERNEL(NAME, T, C)                                                                                             \
    int NAME(const void* q, const void* q_rope, const void* c, const void* r, void* out, const int32_t* starts,        \
             const int32_t* kv_lens, const int32_t* table, const LatentSizes* sizes, float scale, int threads) {       \
        return run<T, C>(q, q_rope, c, r, out, starts, kv_lens, table, *sizes, scale, threads);                        \
    }
KERNEL(latent_attention_int8_f32, float, int8_t)
KERNEL(latent_attention_int8_bf16, bf16, int8_t)
KERNEL(latent_attention_int4_f32, float, Int4Row)
KERNEL(latent_attention_int4_bf16, bf16, Int4Row)
