// Lesson 17. Lesson 3's kernel over int8 rows: only how a key or a value is loaded, and written, differs.
//
// A row is dim integers and, in its last 4 bytes, their scale. The scales stay out of the inner loops:
//
//   score of a key    = (q . integers) * the key's scale
//   value in the sum  = (weight * the value's scale) * integers
//
// The integers are widened in registers, where every int8 is exact in bfloat16 too; or, better still, multiplied as
// they are (int8_codes.h), where the processor can and heads have whole vectors of them.

#include "../attention/tasks.h"
#include "int8_codes.h"

#include <cfloat>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

// ---------------------------------------------------------------- int8 in vectors of floats

INLINE vec widen(const int8_t* p) {
#if defined(__AVX512F__)  // GCC makes more than two instructions of the conversion below
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    typedef int16_t words __attribute__((vector_size(2 * LANES)));
    bytes x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(x, words), ivec), vec);
#endif
}
INLINE vec widen(const float* p) { return load(p); }
INLINE vec widen(const bf16* p) {
    halves x;
    memcpy(&x, p, sizeof x);
    return (vec)(__builtin_convertvector(x, uvec) << 16);
}
using Halves = std::make_integer_sequence<int, 2 * LANES>;
typedef uint16_t all_halves __attribute__((vector_size(4 * LANES)));
template <int... I>
INLINE vec join(vec a, vec b, std::integer_sequence<int, I...>) {  // two vectors of bfloat16 as one: their upper halves
#if defined(__clang__)
    return (vec)__builtin_shufflevector((all_halves)a, (all_halves)b, (2 * I + 1)...);
#else
    return (vec)__builtin_shuffle((all_halves)a, (all_halves)b, all_halves{(2 * I + 1)...});
#endif
}
INLINE vec join(vec a, vec b) { return join(a, b, Halves{}); }
INLINE vec paired(vec low, vec high) {  // in each lane, bfloat16 of both
    return (vec)((uvec)low >> 16 | ((uvec)high & 0xffff0000));
}

// ---------------------------------------------------------------- a cache of int8 rows

template <typename T>
struct Int8 {  // of a cache that queries of T read
    int8_t value;
};
template <typename T>
constexpr int PER_LOAD<Int8<T>> = PER_LOAD<T>;  // a load gives as many elements as one of T

template <typename T>
struct Words<Int8<T>> : Words<T> {
    using C = Int8<T>;
    using Element = C;
    static constexpr int VECTORS = PER_LOAD<T>;                // of elements in their order, not even ones and odd ones
    static constexpr bool PAIRS = Words<T>::PIECES < VECTORS;  // words are pairs of bfloat16

    static int64_t stride(int dim) { return int8_stride(dim); }
    static vec scales(CacheRows<C> row, int dim) { return int8_scales(row, dim); }
    static void open(CacheRows<C> row, int dim, C* to, int width) {
        for (int j = 0; j < LANES; j++) std::copy(row[j], row[j] + dim, to + j * width);
    }
    static void load_query(const T* p, vec* x) {
        for (int i = 0; i < VECTORS && !PAIRS; i++) x[i] = widen(p + i * LANES);
        if (PAIRS) memcpy(x, p, sizeof *x);
    }
    static void load_key(const C* p, vec* x) {
        for (int i = 0; i < VECTORS && !PAIRS; i++) x[i] = widen(&p[i * LANES].value);
        if (PAIRS) x[0] = join(widen(&p[0].value), widen(&p[LANES].value));
    }
    static void load_values(CacheRows<C> value, int d, vec* x) {
        for (int i = 0; i < VECTORS; i++) {
            x[i] = widen(&value[0][d + i * LANES].value);
            if (PAIRS) x[i] = paired(x[i], widen(&value[1][d + i * LANES].value));
        }
    }
    static void store_values(T* p, const vec* x) {
        for (int i = 0; i < VECTORS; i++) store(p + i * LANES, x[i]);
    }
};

// ---------------------------------------------------------------- writing rows

// As rows.py's pack, to the bit.
template <typename T>
static void write_row(const T* x, int dim, int8_t* row) {
    const float scale = largest_size(x, dim) / 127, divisor = scale < FLT_MIN ? FLT_MIN : scale;
    for (int d = 0; d < dim; d++) {
        const float multiple = widen(x[d]) / divisor + 12582912.f;  // 1.5 * 2^23: its lowest bits; NaN has 0
        int32_t bits;
        memcpy(&bits, &multiple, sizeof bits);
        row[d] = int8_t(bits);
    }
    const int end = (dim + 3) / 4 * 4;
    std::fill(row + dim, row + end, int8_t{});
    memcpy(row + end, &scale, sizeof scale);
}

template <typename T>
static void write_slot(const void* vectors, int64_t heads, int64_t dim, void* cache, int64_t slot) {
    const int64_t size = Words<Int8<T>>::stride(int(dim));
    for (int64_t h = 0; h < heads; h++)
        write_row((const T*)vectors + h * dim, int(dim), (int8_t*)cache + (slot * heads + h) * size);
}

extern "C" PagedAttention paged_attention_int8_f32, paged_attention_int8_bf16;
extern "C" WriteSlot write_slot_int8_f32, write_slot_int8_bf16;

void write_slot_int8_f32(const void* vectors, int64_t heads, int64_t dim, void* cache, int64_t slot) {
    write_slot<float>(vectors, heads, dim, cache, slot);
}
void write_slot_int8_bf16(const void* vectors, int64_t heads, int64_t dim, void* cache, int64_t slot) {
    write_slot<bf16>(vectors, heads, dim, cache, slot);
}

int paged_attention_int8_f32(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                             const int32_t* kv_lens, const int32_t* table, const AttentionSizes* sizes, float scale,
                             int threads) {
    return run<float, Int8<float>>(q, k, v, out, starts, kv_lens, table, *sizes, scale, threads);
}
int paged_attention_int8_bf16(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                              const int32_t* kv_lens, const int32_t* table, const AttentionSizes* sizes, float scale,
                              int threads) {
#if MULTIPLIES_BYTES
    if (sizes->dim % (4 * LANES) == 0)
        return run<bf16, Int8Codes>(q, k, v, out, starts, kv_lens, table, *sizes, scale, threads);
#endif
    return run<bf16, Int8<bf16>>(q, k, v, out, starts, kv_lens, table, *sizes, scale, threads);
}
