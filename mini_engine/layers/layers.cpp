// Lesson 9. Qwen3's decoder layers over packed weights and lesson 3's pool; one call runs all of them.
//
//   before_attention   norm, q/k/v, norm of each head, RoPE, K and V into their slots
//   attention          lesson 3's kernel, passed in as a function pointer
//   after_attention    o and the residual, norm, gate and up, SiLU, down and the residual
//
// The interface is plain C, as in lesson 3: pointers and sizes, no types of Python or torch.

#include "../attention/paged_cpu.h"
#include "fused.h"

#include <chrono>

extern "C" {
enum Part { NORMS, MATRICES, HEADS, WRITES, ATTENTION, WAITING, LAST, NUM_TIMES };  // native.py has the same
struct Shape {  // the same for all layers
    int64_t hidden, heads, kv_heads, dim, intermediate;
    float eps;
};
struct Layer {
    Matrix q, k, v, o, gate, up, down;
    const void *input_norm, *post_norm, *q_norm, *k_norm;
};
struct Memory {  // rows that start `stride` elements apart
    void* data;
    int64_t stride;
};
struct Step {  // one step's activations
    int64_t tokens;
    Memory x, normed, qkv, attended, activated;  // [tokens, ...]: hidden, hidden, q + k + v, q, intermediate
    const void *cos, *sin;                       // [tokens, dim]
    const int64_t* slots;                        // [tokens], where K and V are written
    const int64_t* sampled;                      // rows that the last layer still needs after K and V, ascending
    int64_t samples;
    double* seconds;  // [threads, NUM_TIMES]: each part's, and when a thread's last one ended; or nullptr
};
struct Pool {
    PagedAttention* attention;
    void *const *k, *const *v;  // each layer's cache
    const int32_t *starts, *sampled_starts, *kv_lens, *table;
    AttentionSizes sizes;  // as lesson 3's kernel expects; the number of rows is set per layer
    float scale;
};
}

static void record_time(double* seconds, Part part) {  // the calling thread has finished a part
    if (!seconds) return;
    const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
    seconds[part] += now.count() - seconds[LAST];
    seconds[LAST] = now.count();
}
static void lap_of_all(double* seconds, Part part, int threads) {
    for (int t = 0; t < threads && seconds; t++) record_time(seconds + t * NUM_TIMES, part);
}

template <typename T>
struct Decoder {
    const Shape& s;
    const Step& step;

    void done(Part part) const { record_time(step.seconds ? step.seconds + thread_number() * NUM_TIMES : nullptr, part); }
    void wait() const { barrier(), done(WAITING); }

    Rows<T> rows(const Memory& m, int64_t width) const { return {(T*)m.data, step.tokens, width, m.stride}; }
    Rows<T> x() const { return rows(step.x, s.hidden); }
    Rows<T> normed() const { return rows(step.normed, s.hidden); }
    Rows<T> activated() const { return rows(step.activated, s.intermediate); }
    Rows<T> attended() const { return rows(step.attended, s.heads * s.dim); }
    Rows<T> qkv() const { return rows(step.qkv, (s.heads + 2 * s.kv_heads) * s.dim); }

    // Without caches, K and V stay where they are, in the rows of qkv.
    void before_attention(const Layer& layer, T* k_cache, T* v_cache) const {
        rms_norm(x(), (const T*)layer.input_norm, s.eps, normed());
        done(NORMS), wait();
        Rows<T> out = qkv();
        for (const Matrix* m : {&layer.q, &layer.k, &layer.v}) {
            store_linear(normed(), *m, out);
            out.data += m->outputs;
        }
        done(MATRICES), wait();
#pragma omp for schedule(static)
        for (int64_t t = 0; t < step.tokens; t++) finish_heads(layer, t, k_cache, v_cache);
    }

    void finish_heads(const Layer& layer, int64_t token, T* k_cache, T* v_cache) const {
        T* head = qkv().at(token);
        const T *cos = (const T*)step.cos + token * s.dim, *sin = (const T*)step.sin + token * s.dim;
        for (int64_t h = 0; h < s.heads + s.kv_heads; h++) {
            const void* weight = h < s.heads ? layer.q_norm : layer.k_norm;
            norm_and_rope(head + h * s.dim, (const T*)weight, cos, sin, s.dim, s.eps);
        }
        done(HEADS);
        if (!k_cache) return;
        const int64_t width = s.kv_heads * s.dim, slot = step.slots[token] * width;
        const T* k = head + s.heads * s.dim;
        std::copy(k, k + width, k_cache + slot);
        std::copy(k + width, k + 2 * width, v_cache + slot);
        done(WRITES);
    }

    void after_attention(const Layer& layer) const {
        add_linear(attended(), layer.o, x());
        done(MATRICES), wait();
        rms_norm(x(), (const T*)layer.post_norm, s.eps, normed());
        done(NORMS), wait();
        gate_and_up(normed(), layer.gate, layer.up, activated());
        done(MATRICES), wait();
        add_linear(activated(), layer.down, x());
        done(MATRICES), wait();
    }
};

template <typename T>
static void keep_rows(const Memory& m, int64_t width, const int64_t* rows, int64_t count) {
    T* data = (T*)m.data;
    for (int64_t i = 0; i < count; i++)
        if (rows[i] != i) std::copy_n(data + rows[i] * m.stride, width, data + i * m.stride);
}

// The result of a row that is not sampled is never read, so of such rows the last layer computes only K and V.
template <typename T>
static int run_layers(const Shape& s, const Layer* layers, int count, const Step& all, Pool pool, int threads) {
    Step step = all;
    const Decoder<T> decoder{s, step};
    lap_of_all(step.seconds, LAST, threads);  // begins
    for (int i = 0; i < count; i++) {
        T *k = (T*)pool.k[i], *v = (T*)pool.v[i];
#pragma omp parallel num_threads(threads)
        decoder.before_attention(layers[i], k, v);
        if (i + 1 == count) {
            keep_rows<T>(step.x, s.hidden, step.sampled, step.samples);
            keep_rows<T>(step.qkv, s.heads * s.dim, step.sampled, step.samples);
            step.tokens = step.samples, pool.starts = pool.sampled_starts;
        }
        pool.sizes.num_rows = step.tokens;
        const int bad_seq = pool.attention(step.qkv.data, k, v, step.attended.data, pool.starts, pool.kv_lens,
                                           pool.table, &pool.sizes, pool.scale, threads);
        if (bad_seq >= 0) return bad_seq;
        lap_of_all(step.seconds, ATTENTION, threads);
#pragma omp parallel num_threads(threads)
        decoder.after_attention(layers[i]);
    }
    return -1;
}

template <typename T>
static void run_linear(const T* x, int64_t rows, int64_t inputs, int64_t stride, const Matrix& m, T* out, int threads) {
#pragma omp parallel num_threads(threads)
    store_linear<T>({const_cast<T*>(x), rows, inputs, stride}, m, {out, rows, m.outputs, m.outputs});
}

// Every function, for float and for bfloat16. run_layers returns -1, or the sequence with an invalid block table.
#define FUNCTIONS(T, NAME)                                                                                             \
    extern "C" void linear_##NAME(const void* x, int64_t rows, int64_t inputs, int64_t stride, const Matrix* m,        \
                                  void* out, int threads) {                                                            \
        run_linear<T>((const T*)x, rows, inputs, stride, *m, (T*)out, threads);                                        \
    }                                                                                                                  \
    extern "C" void before_attention_##NAME(const Shape* shape, const Layer* layer, const Step* step, int threads) {   \
        const Decoder<T> decoder{*shape, *step};                                                                       \
        _Pragma("omp parallel num_threads(threads)") decoder.before_attention(*layer, nullptr, nullptr);               \
    }                                                                                                                  \
    extern "C" void after_attention_##NAME(const Shape* shape, const Layer* layer, const Step* step, int threads) {    \
        const Decoder<T> decoder{*shape, *step};                                                                       \
        _Pragma("omp parallel num_threads(threads)") decoder.after_attention(*layer);                                  \
    }                                                                                                                  \
    extern "C" int run_layers_##NAME(const Shape* shape, const Layer* layers, int count, const Step* step,             \
                                     const Pool* pool, int threads) {                                                  \
        return run_layers<T>(*shape, layers, count, *step, *pool, threads);                                            \
    }
FUNCTIONS(float, f32)
FUNCTIONS(bf16, bf16)
