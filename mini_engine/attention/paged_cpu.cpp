// Lesson 3. Paged attention for processors: no gather, keys and values are read in place.
//
// scalar.h is the whole kernel in plain code; read it first. The rest computes the same, faster. A task is a tile of
// one sequence's queries, for some key/value heads, over a stretch of the history. Within it the history goes by in
// tiles of as many keys as a vector has lanes:
//
//   scores[row][j] = q[row] . key[j]                          score; transpose_keys and score_transposed for many rows
//   one online-softmax update for the whole tile              softmax_update   (Milakov and Gimelshein, 2018)
//   sums[row] += weights[row][j] * value[j]                   add_values
//
// "Rows" are the tile's queries times the query heads that share the key/value head: all of them use each load.
//
// tasks.h says what is summed in which order, and by which thread.

#include "scalar.h"
#include "tasks.h"

int paged_attention_f32(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                        const int32_t* kv_lens, const int32_t* table, const AttentionSizes* sizes, float scale,
                        int threads) {
    return run<float, float>(q, k, v, out, starts, kv_lens, table, *sizes, scale, threads);
}
int paged_attention_bf16(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                         const int32_t* kv_lens, const int32_t* table, const AttentionSizes* sizes, float scale,
                         int threads) {
    return run<bf16, bf16>(q, k, v, out, starts, kv_lens, table, *sizes, scale, threads);
}

template <typename T>
static void write_slot(const void* vectors, int64_t size, void* cache, int64_t slot) {
    std::copy_n((const T*)vectors, size, (T*)cache + slot * size);
}
void write_slot_f32(const void* vectors, int64_t heads, int64_t dim, void* cache, int64_t slot) {
    write_slot<float>(vectors, heads * dim, cache, slot);
}
void write_slot_bf16(const void* vectors, int64_t heads, int64_t dim, void* cache, int64_t slot) {
    write_slot<bf16>(vectors, heads * dim, cache, slot);
}

int64_t paged_attention_spared(const int32_t* starts, const int32_t* kv_lens, const int32_t* table,
                               const AttentionSizes* sizes) {
    int64_t keys = 0;
    for (const Run& run : find_runs(starts, kv_lens, table, *sizes, LANES)) keys += (run.seqs.size() - 1) * run.keys;
    return keys;
}

int paged_attention_scalar_f32(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                               const int32_t* kv_lens, const int32_t* table, const AttentionSizes* sizes, float scale,
                               int) {
    return run_scalar((const float*)q, (const float*)k, (const float*)v, (float*)out, starts, kv_lens, table, *sizes,
                      scale);
}
int paged_attention_scalar_bf16(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                                const int32_t* kv_lens, const int32_t* table, const AttentionSizes* sizes, float scale,
                                int) {
    return run_scalar((const bf16*)q, (const bf16*)k, (const bf16*)v, (bf16*)out, starts, kv_lens, table, *sizes,
                      scale);
}
