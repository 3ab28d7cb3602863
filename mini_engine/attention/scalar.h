// Lesson 3. The kernel before it is made fast: blockwise.py in C++, one number at a time. tasks.h and tile.h compute
// the same with vectors, tiles and threads, and are tested against it.

#pragma once
#include "paged_cpu.h"
#include "vectors.h"

#include <vector>

// One head of one query, which sees the last `window` of the sequence's first `keys` keys. `row` is the sequence's row
// of the block table.
template <typename T>
static void attend_scalar(const T* q, const T* k, const T* v, T* out, const int32_t* row, int64_t keys, int64_t kv_head,
                          const AttentionSizes& n, float scale) {
    float largest = -INFINITY, total = 0;  // of the scores so far; the sum of exp(score - largest)
    std::vector<float> sums(n.dim);        // the sum of exp(score - largest) * value
    for (int64_t i = first_key(keys, n.window); i < keys; i++) {
        const int64_t slot = row[i / n.block_size] * n.block_size + i % n.block_size;
        const T *key = k + (slot * n.kv_heads + kv_head) * n.dim, *value = v + (key - k);  // read in place
        float score = 0;
        for (int64_t d = 0; d < n.dim; d++) score += widen(q[d]) * widen(key[d]);
        score *= scale;
        const float before = largest;
        largest = std::max(largest, score);
        const float rescale = std::exp(before - largest), part = std::exp(score - largest);  // online softmax
        total = total * rescale + part;
        for (int64_t d = 0; d < n.dim; d++) sums[d] = sums[d] * rescale + part * widen(value[d]);
    }
    for (int64_t d = 0; d < n.dim; d++) narrow(sums[d] / total, out + d);
}

template <typename T>
static int run_scalar(const T* q, const T* k, const T* v, T* out, const int32_t* starts, const int32_t* kv_lens,
                      const int32_t* table, const AttentionSizes& n, float scale) {
    if (const int seq = bad_seq(starts, kv_lens, table, n); seq >= 0) return seq;
    for (int64_t s = 0; s < n.num_seqs; s++)
        for (int64_t r = starts[s]; r < starts[s + 1]; r++)
            for (int64_t h = 0; h < n.heads; h++)
                attend_scalar(q + r * n.q_stride + h * n.dim, k, v, out + r * n.out_stride + h * n.dim,
                              table + s * n.max_blocks, kv_lens[s] - (starts[s + 1] - r) + 1,
                              h / (n.heads / n.kv_heads), n, scale);
    for (int64_t r = starts[n.num_seqs]; r < n.num_rows; r++) std::fill_n(out + r * n.out_stride, n.heads * n.dim, T{});
    return -1;
}
