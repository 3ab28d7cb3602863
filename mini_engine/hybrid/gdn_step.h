// Lesson 11. One token of each of N sequences through a gated delta net: convolution, delta rule, both states,
// in place or from one slot to another.
//
// A head's state is read from memory once and written once. torch, which has no such operation, reads and writes it once
// for every line of the recurrence. Everything is computed in float32; a value is rounded only when it is stored.

#pragma once
#include "../layers/fused.h"
#include <vector>

extern "C" {
struct StepSizes {
    int64_t sequences, key_heads, value_heads, key_dim, value_dim, taps;
    int64_t stride;  // elements from one row of qkv to the next
};
struct Gates {  // for a whole layer: g and beta come from b and a, and the output is normed and gated
    const void *z, *b, *a;                // rows `stride` apart, as qkv's: [value_heads * value_dim], [value_heads] twice
    const float *rate, *dt_bias, *norm;   // exp(A_log) and dt_bias [value_heads], the norm's weight [value_dim]
    float eps;
};
}

template <typename T>
struct DeltaStep {
    const StepSizes& s;
    const T* qkv;              // [sequences, conv_dim]: q of every key head, k of every key head, v of every value head
    const float *g, *beta;     // [sequences, value_heads]
    const T* weight;           // [conv_dim, taps]
    T* conv;                   // [slots, conv_dim, taps - 1], the latest input last
    float* recurrent;          // [slots, value_heads, key_dim, value_dim]
    const int64_t *sources, *slots;  // [sequences]: where the state before the token is, and where the one behind goes
    T* out;                    // [sequences, value_heads, value_dim], rows `out_stride` apart
    int64_t out_stride;
    const Gates* gates;        // nullptr: g and beta are given, and the output stays as it is

    // Channels begin ... begin + n - 1 of a sequence: convolve, shift the new input into the state, SiLU.
    void convolve(int64_t sequence, int64_t begin, int64_t n, float* to) const {
        const int64_t channels = 2 * s.key_heads * s.key_dim + s.value_heads * s.value_dim, kept = s.taps - 1;
        const T *x = qkv + sequence * s.stride + begin, *w = weight + begin * s.taps;
        const T* before = conv + (sources[sequence] * channels + begin) * kept;
        T* state = conv + (slots[sequence] * channels + begin) * kept;
        for (int64_t c = 0; c < n; c++, w += s.taps, before += kept, state += kept) {
            float sum = widen(w[kept]) * widen(x[c]);
            for (int64_t i = 0; i < kept; i++) sum += widen(w[i]) * widen(before[i]);
            for (int64_t i = 0; i + 1 < kept; i++) state[i] = before[i + 1];
            if (kept) state[kept - 1] = x[c];
            to[c] = sum;
        }
        for (int64_t c = 0; c < n; c += LANES) store_some(to + c, silu(load_some(to + c, n - c)), n - c);
    }

    static void normalize(float* x, int64_t n, float scale) {
        vec sum = {};
        for (int64_t i = 0; i < n; i += LANES) {
            const vec y = load_some(x + i, n - i);
            sum += y * y;
        }
        const float factor = scale / std::sqrt(fold_lanes(sum, plus)[0] + 1e-6f);
        for (int64_t i = 0; i < n; i++) x[i] *= factor;
    }

    // WIDE vectors of a state's columns: fade, read with k, write the difference to v, read with q. Meanwhile the next
    // head's state, which lies behind this one, is prefetched: memory is never idle.
    template <int WIDE>
    void columns(const float* before, float* state, const float* q, const float* k, const float* v, float left,
                 float part, float* to, int64_t count) const {
        vec known[WIDE] = {}, read[WIDE] = {};
        for (int64_t i = 0; i < s.key_dim; i++)
            for (int w = 0; w < WIDE; w++)
                known[w] += load_some(before + i * s.value_dim + w * LANES, count - w * LANES) * k[i];
        for (int w = 0; w < WIDE; w++) known[w] = (load_some(v + w * LANES, count - w * LANES) - known[w] * left) * part;
        for (int64_t i = 0; i < s.key_dim; i++)
            for (int w = 0; w < WIDE; w++) {
                const float* at = before + i * s.value_dim + w * LANES;
                prefetch(at + s.key_dim * s.value_dim);
                const vec now = load_some(at, count - w * LANES) * left + known[w] * k[i];
                store_some(state + i * s.value_dim + w * LANES, now, count - w * LANES);
                read[w] += now * q[i];
            }
        for (int w = 0; w < WIDE; w++) store_some(to + w * LANES, read[w], count - w * LANES);
    }

    float faded(int64_t sequence, int64_t h) const {  // the logarithm of what is left of the state
        if (!gates) return g[sequence * s.value_heads + h];
        const float x = widen(((const T*)gates->a)[sequence * s.stride + h]) + gates->dt_bias[h];
        return -gates->rate[h] * (x > 20 ? x : std::log1p(std::exp(x)));
    }
    float written(int64_t sequence, int64_t h) const {  // how much of the difference
        if (!gates) return beta[sequence * s.value_heads + h];
        return 1 / (1 + std::exp(-widen(((const T*)gates->b)[sequence * s.stride + h])));
    }

    void finish(int64_t sequence, int64_t h, const float* o) const {
        T* to = out + sequence * out_stride + h * s.value_dim;
        const T* z = gates ? (const T*)gates->z + sequence * s.stride + h * s.value_dim : nullptr;
        const float factor = gates ? inverse_rms(o, s.value_dim, gates->eps) : 1;
        for (int64_t j = 0; j < s.value_dim; j += LANES) {
            const int64_t left = s.value_dim - j;
            vec x = load_some(o + j, left) * factor;
            if (gates) x = x * load_some(gates->norm + j, left) * silu(load_some(z + j, left));
            store_some(to + j, x, left);
        }
    }

    void key_head(int64_t sequence, int64_t head, float* q, float* k, float* v, float* o) const {
        const int64_t keys = s.key_heads * s.key_dim, group = s.value_heads / s.key_heads;
        convolve(sequence, head * s.key_dim, s.key_dim, q);
        convolve(sequence, keys + head * s.key_dim, s.key_dim, k);
        normalize(q, s.key_dim, 1 / std::sqrt(float(s.key_dim)));
        normalize(k, s.key_dim, 1);
        for (int64_t h = head * group; h < (head + 1) * group; h++) {
            convolve(sequence, 2 * keys + h * s.value_dim, s.value_dim, v);
            const int64_t size = s.key_dim * s.value_dim;
            const float* before = recurrent + (sources[sequence] * s.value_heads + h) * size;
            float* state = recurrent + (slots[sequence] * s.value_heads + h) * size;
            const float left = std::exp(faded(sequence, h)), part = written(sequence, h);
            int64_t j = 0;
            for (; j + 8 * LANES <= s.value_dim; j += 8 * LANES)
                columns<8>(before + j, state + j, q, k, v + j, left, part, o + j, 8 * LANES);
            for (; j < s.value_dim; j += LANES)
                columns<1>(before + j, state + j, q, k, v + j, left, part, o + j, s.value_dim - j);
            finish(sequence, h, o);
        }
    }

    void run() const {  // called by all threads of a team, which divide heads among themselves
        std::vector<float> room(2 * s.key_dim + 2 * s.value_dim);
        float *q = room.data(), *k = q + s.key_dim, *v = k + s.key_dim, *o = v + s.value_dim;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < s.sequences * s.key_heads; task++)
            key_head(task / s.key_heads, task % s.key_heads, q, k, v, o);
    }
};
