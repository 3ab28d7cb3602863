// Lesson 12. Lesson 3's kernel over int8 rows: only how a key or a value is loaded differs.
//
// A row is dim integers and, in its last 4 bytes, their scale. The integers are widened in registers, where every
// int8 is exact in bfloat16 too, and the scales stay out of the inner loops:
//
//   score of a key    = (q . integers) * the key's scale
//   value in the sum  = (weight * the value's scale) * integers

#include "../attention/tasks.h"

template <typename T>
struct Int8 {  // of a cache that queries of T read
    int8_t value;
};
template <typename T>
constexpr int PER_LOAD<Int8<T>> = PER_LOAD<T>;  // as many elements as a load of T gives

INLINE vec whole(ivec x) { return __builtin_convertvector(x, vec); }
INLINE void load_split(const Int8<float>* p, vec* x) {
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    bytes row;
    memcpy(&row, p, sizeof row);
    x[0] = whole(__builtin_convertvector(row, ivec));
}
INLINE void load_split(const Int8<bf16>* p, vec* x) {  // the even and the odd integers, as of bfloat16
    halves pairs;
    memcpy(&pairs, p, sizeof pairs);
    const ivec both = (ivec)__builtin_convertvector(pairs, uvec);
    x[0] = whole(both << 24 >> 24);
    x[1] = whole(both << 16 >> 24);
}
INLINE vec paired(vec even, vec odd) { return (vec)((uvec)even >> 16 | ((uvec)odd & 0xffff0000)); }

template <typename T>
struct Words<Int8<T>> : Words<T> {
    using C = Int8<T>;
    static int64_t stride(int dim) { return (dim + 3) / 4 * 4 + 4; }
    static vec scales(const C* const* row, int dim) {
        vec x;
        for (int j = 0; j < LANES; j++) {
            float scale;
            memcpy(&scale, row[j] + stride(dim) - 4, 4);
            x[j] = scale;
        }
        return x;
    }
    static void load_key(const C* p, vec* x) {
        vec split[PER_LOAD<T>];
        load_split(p, split);
        if constexpr (Words<T>::PIECES == PER_LOAD<T>)
            std::copy(split, split + PER_LOAD<T>, x);
        else
            x[0] = paired(split[0], split[1]);
    }
    static void load_values(const C* const* value, int d, vec* x) {
        load_split(value[0] + d, x);
        if constexpr (Words<T>::KEYS == 2) {  // pairs of two keys' values, the even ones and the odd ones
            vec next[2];
            load_split(value[1] + d, next);
            for (int i = 0; i < 2; i++) x[i] = paired(x[i], next[i]);
        }
    }
};

extern "C" PagedAttention paged_attention_int8_f32, paged_attention_int8_bf16;

int paged_attention_int8_f32(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                             const int32_t* kv_lens, const int32_t* table, const AttentionSizes* sizes, float scale,
                             int threads) {
    return run<float, Int8<float>>(q, k, v, out, starts, kv_lens, table, *sizes, scale, threads);
}
int paged_attention_int8_bf16(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                              const int32_t* kv_lens, const int32_t* table, const AttentionSizes* sizes, float scale,
                              int threads) {
    return run<bf16, Int8<bf16>>(q, k, v, out, starts, kv_lens, table, *sizes, scale, threads);
}
