// Lesson 17. Lesson 3's kernel over int4 rows: each row of a tile is opened (int4_rows.h) before the loops over it.
//
// So the loops are those for a cache of T, and a row that many queries meet is opened once for all of them. What comes
// from memory are the rows, a quarter to a third of the bytes; what is opened stays in the first cache.

#include "../attention/tasks.h"
#include "int4_rows.h"

template <typename T>
struct Int4 {  // a byte of a cache that queries of T read
    uint8_t bits;
};

template <typename T>
struct Words<Int4<T>> : Layout<Int4<T>> {
    using Element = T;
    static int64_t stride(int dim) { return code_bytes(dim) + 4 * num_groups(dim); }
    static NOINLINE void open(const Int4<T>* const* row, int dim, T* to, int width) {
        if (dim == 4 * GROUP) return open_whole<4>((const uint8_t* const*)row, LANES, to, width);
        if (dim == 2 * GROUP) return open_whole<2>((const uint8_t* const*)row, LANES, to, width);
        for (int j = 0; j < LANES; j++) open_row(&row[j]->bits, dim, to + j * width);
    }
};

extern "C" PagedAttention paged_attention_int4_f32, paged_attention_int4_bf16;

int paged_attention_int4_f32(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                             const int32_t* kv_lens, const int32_t* table, const AttentionSizes* sizes, float scale,
                             int threads) {
    return run<float, Int4<float>>(q, k, v, out, starts, kv_lens, table, *sizes, scale, threads);
}
int paged_attention_int4_bf16(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                              const int32_t* kv_lens, const int32_t* table, const AttentionSizes* sizes, float scale,
                              int threads) {
    return run<bf16, Int4<bf16>>(q, k, v, out, starts, kv_lens, table, *sizes, scale, threads);
}
