// Lesson 17. Lesson 3's kernel over int4 rows: each row of a tile is opened (int4_rows.h) before the loops over it.
//
// So the loops are those for a cache of T, and a row that many queries meet is opened once for all of them. What comes
// from memory are the rows, a quarter to a third of the bytes; what is opened stays in the first cache. Better still is
// not to open them: where the processor can, and heads have 128 numbers or a multiple, codes are multiplied as they are
// (int4_codes.h).

#include "../attention/tasks.h"
#include "int4_codes.h"
#include "int4_rows.h"
#include "int4_write.h"

template <typename T>
struct Int4 {  // a byte of a cache that queries of T read
    uint8_t bits;
};

template <typename T>
struct Words<Int4<T>> : Layout<Int4<T>> {
    using Element = T;
    static int64_t stride(int dim) { return row_bytes(dim); }
    static NOINLINE void open(CacheRows<Int4<T>> row, int dim, T* to, int width) {
        const uint8_t* each[LANES];
        for (int j = 0; j < LANES; j++) each[j] = &row[j]->bits;
        if (dim == 4 * GROUP) return open_whole<4>(each, LANES, to, width);
        if (dim == 2 * GROUP) return open_whole<2>(each, LANES, to, width);
        for (int j = 0; j < LANES; j++) open_row(each[j], dim, to + j * width);
    }
};

template <typename T>
static void write_slot(const void* vectors, int64_t heads, int64_t dim, void* cache, int64_t slot) {
    const int64_t size = Words<Int4<T>>::stride(int(dim));
    std::vector<float> turned(dim);
    for (int64_t h = 0; h < heads; h++) {
        rotate_vector((const T*)vectors + h * dim, int(dim), turned.data());
        write_row(turned.data(), int(dim), (uint8_t*)cache + (slot * heads + h) * size);
    }
}

template <typename T>
static int attend(const T* q, const void* k, const void* v, T* out, const int32_t* starts, const int32_t* kv_lens,
                  const int32_t* table, const AttentionSizes& n, float scale, int threads) {
#if MULTIPLIES_BYTES
    using Codes = Words<Int4Codes>;
    if constexpr (std::is_same_v<T, bf16>)
        if (n.dim % Codes::SPAN == 0 && n.dim <= Codes::SPAN * Codes::Coding::MOST_SPANS)
            return run<T, Int4Codes>(q, k, v, out, starts, kv_lens, table, n, scale, threads);
#endif
    return run<T, Int4<T>>(q, k, v, out, starts, kv_lens, table, n, scale, threads);
}

// The kernel for queries that are not rotated. They are before it, and its results are rotated back.
template <typename T>
static int rotating_attention(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                              const int32_t* kv_lens, const int32_t* table, AttentionSizes n, float scale,
                              int threads) {
    const int64_t width = n.heads * n.dim;
    std::vector<T> turned(n.num_rows * width);
    rotate_rows((const T*)q, n.q_stride, turned.data(), width, n, threads);
    n.q_stride = width;
    const int bad = attend(turned.data(), k, v, (T*)out, starts, kv_lens, table, n, scale, threads);
    if (bad < 0) rotate_rows((const T*)out, n.out_stride, (T*)out, n.out_stride, n, threads);
    return bad;
}

extern "C" PagedAttention paged_attention_int4_f32, paged_attention_int4_bf16;
extern "C" PagedAttention rotating_attention_int4_f32, rotating_attention_int4_bf16;
extern "C" WriteSlot write_slot_int4_f32, write_slot_int4_bf16;

void write_slot_int4_f32(const void* vectors, int64_t heads, int64_t dim, void* cache, int64_t slot) {
    write_slot<float>(vectors, heads, dim, cache, slot);
}
void write_slot_int4_bf16(const void* vectors, int64_t heads, int64_t dim, void* cache, int64_t slot) {
    write_slot<bf16>(vectors, heads, dim, cache, slot);
}
int rotating_attention_int4_f32(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                                const int32_t* kv_lens, const int32_t* table, const AttentionSizes* sizes, float scale,
                                int threads) {
    return rotating_attention<float>(q, k, v, out, starts, kv_lens, table, *sizes, scale, threads);
}
int rotating_attention_int4_bf16(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                                 const int32_t* kv_lens, const int32_t* table, const AttentionSizes* sizes, float scale,
                                 int threads) {
    return rotating_attention<bf16>(q, k, v, out, starts, kv_lens, table, *sizes, scale, threads);
}

int paged_attention_int4_f32(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                             const int32_t* kv_lens, const int32_t* table, const AttentionSizes* sizes, float scale,
                             int threads) {
    return attend((const float*)q, k, v, (float*)out, starts, kv_lens, table, *sizes, scale, threads);
}
int paged_attention_int4_bf16(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                              const int32_t* kv_lens, const int32_t* table, const AttentionSizes* sizes, float scale,
                              int threads) {
    return attend((const bf16*)q, k, v, (bf16*)out, starts, kv_lens, table, *sizes, scale, threads);
}
