// Lesson 9. What layers write and read beside weights: rows of activations, and each layer's cache in a step.
//
// How K and V are stored is the pool's business: it brings two functions, one that writes a slot and one that attends.

#pragma once
#include "../attention/paged_cpu.h"

#include <algorithm>

extern "C" {
struct Place {  // rows that start `stride` elements apart
    void* data;
    int64_t stride;
};
struct Cache {  // what one layer writes and reads
    void *k, *v;
    const int64_t* slots;  // [tokens], where K and V are written
    const int32_t* table;  // [num_seqs, max_blocks], what attention reads
    int64_t max_blocks, window;
};
struct Pool {
    WriteSlot* write;
    PagedAttention* attention;
    const Cache* caches;  // one for each layer
    const int32_t *starts, *sampled_starts, *kv_lens;
    int64_t num_seqs, num_blocks, block_size;
    float scale;
};
struct Heads {
    int64_t heads, kv_heads, dim;
};
}

static inline AttentionSizes sizes_of(const Pool& pool, const Cache& cache, const Heads& n, int64_t rows,
                                      int64_t q_stride, int64_t out_stride) {
    return {pool.num_seqs,   rows,             n.heads,  n.kv_heads, n.dim,       pool.num_blocks,
            pool.block_size, cache.max_blocks, q_stride, out_stride, cache.window};
}

// The first layer whose table names a block that does not exist, times num_seqs, plus the sequence; or -1.
static inline int bad_table(const Pool& pool, int count) {
    for (int i = 0; i < count; i++) {
        const Cache &cache = pool.caches[i], *before = pool.caches, *end = before + i;
        const auto same = [&](const Cache& c) { return c.table == cache.table && c.window == cache.window; };
        if (std::any_of(before, end, same)) continue;
        const int seq = bad_seq(pool.starts, pool.kv_lens, cache.table, sizes_of(pool, cache, {}, 0, 0, 0));
        if (seq >= 0) return i * pool.num_seqs + seq;
    }
    return -1;
}

template <typename T>
static void write_token(const Pool& pool, const Cache& cache, const Heads& n, int64_t token, const T* k) {  // k, then v
    pool.write(k, n.kv_heads, n.dim, cache.k, cache.slots[token]);
    pool.write(k + n.kv_heads * n.dim, n.kv_heads, n.dim, cache.v, cache.slots[token]);
}

// Not called by a team: the pool's function starts its own threads. Tables have been checked by `bad_table`.
static inline void attend(const Pool& pool, const Cache& cache, const Heads& n, int64_t rows, const Place& q,
                          const Place& out, int threads) {
    const AttentionSizes sizes = sizes_of(pool, cache, n, rows, q.stride, out.stride);
    pool.attention(q.data, cache.k, cache.v, out.data, pool.starts, pool.kv_lens, cache.table, &sizes, pool.scale,
                   threads);
}
