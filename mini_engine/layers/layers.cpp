// Lesson 9. Qwen3's decoder layers over packed weights and each layer's cache; one call runs all of them.
//
//   before_attention   norm, q/k/v, norm of each head, RoPE, K and V into their slots
//   attention          the pool's kernel
//   after_attention    o and the residual, norm, gate and up, SiLU, down and the residual
//
// The interface is plain C, as in lesson 3: pointers and sizes, no types of Python or torch.

#include "fused.h"
#include "pool.h"

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
struct Exchange {  // of a process that has a part of every matrix: completes sums over all of them
    int (*add_up)(void* meeting, void* x, int64_t count);  // in place; nullptr if this process has all of each matrix
    void* meeting;
    int64_t is_first, failed;  // the first process alone adds x itself; what add_up returned, if not 0
};
struct Step {  // one step's activations
    int64_t tokens;
    Place x, normed, qkv, attended, activated;   // [tokens, ...]: hidden, hidden, q + k + v, q, intermediate
    const void *cos, *sin;                       // [tokens, dim]
    const int64_t* sampled;  // rows that the last layer still needs after K and V, ascending; nullptr: all
    int64_t samples;
    double* seconds;  // [threads, NUM_TIMES]: each part's, and when a thread's last one ended; or nullptr
    Exchange* exchange;
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

    void done(Part part) const {
        record_time(step.seconds ? step.seconds + thread_number() * NUM_TIMES : nullptr, part);
    }
    void wait() const { barrier(), done(WAITING); }

    Heads heads() const { return {s.heads, s.kv_heads, s.dim}; }
    Rows<T> rows(const Place& m, int64_t width) const { return {(T*)m.data, step.tokens, width, m.stride}; }
    Rows<T> x() const { return rows(step.x, s.hidden); }
    Rows<T> normed() const { return rows(step.normed, s.hidden); }
    Rows<T> activated() const { return rows(step.activated, s.intermediate); }
    Rows<T> attended() const { return rows(step.attended, s.heads * s.dim); }
    Rows<T> qkv() const { return rows(step.qkv, (s.heads + 2 * s.kv_heads) * s.dim); }

    // Without a cache, K and V stay where they are, in the rows of qkv.
    void before_attention(const Layer& layer, const Pool* pool, const Cache* cache) const {
        rms_norm(x(), (const T*)layer.input_norm, s.eps, normed());
        done(NORMS), wait();
        Rows<T> out = qkv();
        for (const Matrix* m : {&layer.q, &layer.k, &layer.v}) {
            store_linear(normed(), *m, out);
            out.data += m->outputs;
        }
        done(MATRICES), wait();
#pragma omp for schedule(static)
        for (int64_t t = 0; t < step.tokens; t++) finish_heads(layer, t, pool, cache);
    }

    void finish_heads(const Layer& layer, int64_t token, const Pool* pool, const Cache* cache) const {
        T* head = qkv().at(token);
        const T *cos = (const T*)step.cos + token * s.dim, *sin = (const T*)step.sin + token * s.dim;
        for (int64_t h = 0; h < s.heads + s.kv_heads; h++) {
            const void* weight = h < s.heads ? layer.q_norm : layer.k_norm;
            norm_and_rope(head + h * s.dim, (const T*)weight, cos, sin, s.dim, s.dim, s.eps);
        }
        done(HEADS);
        if (!cache) return;
        write_token(*pool, *cache, heads(), token, head + s.heads * s.dim);
        done(WRITES);
    }

    void after_attention(const Layer& layer) const {
        add_to_x(attended(), layer.o);
        rms_norm(x(), (const T*)layer.post_norm, s.eps, normed());
        done(NORMS), wait();
        gate_and_up(normed(), layer.gate, layer.up, activated());
        done(MATRICES), wait();
        add_to_x(activated(), layer.down);
    }

    // x += rows · m, over all processes. Each has a part of the product, and one of them x: x becomes a part of the
    // sum.
    void add_to_x(const Rows<T>& rows, const Matrix& m) const {
        Exchange& exchange = *step.exchange;
        exchange.is_first ? add_linear(rows, m, x()) : store_linear(rows, m, x());
        done(MATRICES), wait();
        if (!exchange.add_up) return;
#pragma omp single
        if (!exchange.failed) exchange.failed = exchange.add_up(exchange.meeting, step.x.data, step.tokens * s.hidden);
        done(WAITING);
    }
};

template <typename T>
static void keep_rows(const Place& m, int64_t width, const int64_t* rows, int64_t count) {
    T* data = (T*)m.data;
    for (int64_t i = 0; i < count; i++)
        if (rows[i] != i) std::copy_n(data + rows[i] * m.stride, width, data + i * m.stride);
}

// The result of a row that is not sampled is never read, so of such rows the last layer computes only K and V.
template <typename T>
static int run_layers(const Shape& s, const Layer* layers, int count, const T* last_norm, const Step& all, Pool pool,
                      int threads) {
    if (const int bad = bad_table(pool, count); bad >= 0) return bad;  // nothing has been written
    Step step = all;
    const Decoder<T> decoder{s, step};
    lap_of_all(step.seconds, LAST, threads);  // begins
    for (int i = 0; i < count; i++) {
        const Cache& cache = pool.caches[i];
#pragma omp parallel num_threads(threads)
        decoder.before_attention(layers[i], &pool, &cache);
        if (i + 1 == count && step.sampled) {
            keep_rows<T>(step.x, s.hidden, step.sampled, step.samples);
            keep_rows<T>(step.qkv, s.heads * s.dim, step.sampled, step.samples);
            step.tokens = step.samples, pool.starts = pool.sampled_starts;
        }
        attend(pool, cache, decoder.heads(), step.tokens, step.qkv, step.attended, threads);
        lap_of_all(step.seconds, ATTENTION, threads);
#pragma omp parallel num_threads(threads)
        {
            decoder.after_attention(layers[i]);
            if (i + 1 == count) rms_norm(decoder.x(), last_norm, s.eps, decoder.normed());
        }
    }
    return -1;
}

template <typename T>
static void run_linear(const T* x, int64_t rows, int64_t inputs, int64_t stride, const Matrix& m, T* out, int threads) {
#pragma omp parallel num_threads(threads)
    store_linear<T>({const_cast<T*>(x), rows, inputs, stride}, m, {out, rows, m.outputs, m.outputs});
}

template <typename T>
static void run_norm(const T* x, int64_t rows, int64_t width, int64_t stride, const float* weight, float eps, T* out,
                     int threads) {
    const Rows<T> from{const_cast<T*>(x), rows, width, stride};
#pragma omp parallel num_threads(threads) if (rows > 1)
    rms_norm(from, weight, eps, {out, rows, width, width});
}

// Every function, for float and for bfloat16. run_layers returns -1, or what bad_table has found.
#define FUNCTIONS(T, NAME)                                                                                             \
    extern "C" void linear_##NAME(const void* x, int64_t rows, int64_t inputs, int64_t stride, const Matrix* m,        \
                                  void* out, int threads) {                                                            \
        run_linear<T>((const T*)x, rows, inputs, stride, *m, (T*)out, threads);                                        \
    }                                                                                                                  \
    extern "C" void norm_##NAME(const void* x, int64_t rows, int64_t width, int64_t stride, const float* weight,       \
                                float eps, void* out, int threads) {                                                   \
        run_norm<T>((const T*)x, rows, width, stride, weight, eps, (T*)out, threads);                                  \
    }                                                                                                                  \
    extern "C" void before_attention_##NAME(const Shape* shape, const Layer* layer, const Step* step, int threads) {   \
        const Decoder<T> decoder{*shape, *step};                                                                       \
        _Pragma("omp parallel num_threads(threads)") decoder.before_attention(*layer, nullptr, nullptr);               \
    }                                                                                                                  \
    extern "C" void after_attention_##NAME(const Shape* shape, const Layer* layer, const Step* step, int threads) {    \
        const Decoder<T> decoder{*shape, *step};                                                                       \
        _Pragma("omp parallel num_threads(threads)") decoder.after_attention(*layer);                                  \
    }                                                                                                                  \
    extern "C" int run_layers_##NAME(const Shape* shape, const Layer* layers, int count, const void* last_norm,        \
                                     const Step* step, const Pool* pool, int threads) {                                \
        return run_layers<T>(*shape, layers, count, (const T*)last_norm, *step, *pool, threads);                       \
    }
FUNCTIONS(float, f32)
FUNCTIONS(bf16, bf16)
