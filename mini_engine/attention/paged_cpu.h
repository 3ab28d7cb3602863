// Lesson 3. The C++ kernel as its callers see it: attention/cpu.py from Python, and C++ that calls it directly.

#pragma once
#include <cstdint>

constexpr int64_t EVERY_KEY = INT32_MAX;  // a window that hides none

extern "C" {
struct AttentionSizes {  // of one call; attention/cpu.py has the same struct
    int64_t num_seqs, num_rows, heads, kv_heads, dim;
    int64_t num_blocks, block_size, max_blocks;
    int64_t q_stride, out_stride;  // elements from one row to the next
    int64_t window;                // keys that a query sees, its own included
};

// Returns -1, or the sequence whose block table names a block that does not exist; then nothing was written.
typedef int PagedAttention(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                           const int32_t* kv_lens, const int32_t* table, const AttentionSizes* sizes, float scale,
                           int threads);
// Writes a token's key or value, a vector for each of its heads, into a slot of a cache that such a kernel reads.
typedef void WriteSlot(const void* vectors, int64_t heads, int64_t dim, void* cache, int64_t slot);

WriteSlot write_slot_f32, write_slot_bf16;
PagedAttention paged_attention_f32, paged_attention_bf16;
PagedAttention paged_attention_scalar_f32, paged_attention_scalar_bf16;  // on one thread

// The keys that such a call does not read again, as its decodes share the blocks that hold them (runs.h).
int64_t paged_attention_spared(const int32_t* starts, const int32_t* kv_lens, const int32_t* table,
                               const AttentionSizes* sizes);
}

// The first of the keys that a query sees, if it sees none from `end` on.
static inline int64_t first_key(int64_t end, int64_t window) { return end > window ? end - window : 0; }

// The first sequence whose block table names a block that the cache does not have, among those it reads; or -1.
static inline int bad_seq(const int32_t* starts, const int32_t* kv_lens, const int32_t* table,
                          const AttentionSizes& n) {
    for (int s = 0; s < n.num_seqs; s++) {
        const int q_len = starts[s + 1] - starts[s];
        int64_t i = first_key(kv_lens[s] - q_len + 1, n.window) / n.block_size;  // the first query's first block
        for (; q_len > 0 && i < (kv_lens[s] + n.block_size - 1) / n.block_size; i++)
            if (const int block = table[s * n.max_blocks + i]; block < 0 || block >= n.num_blocks) return s;
    }
    return -1;
}
