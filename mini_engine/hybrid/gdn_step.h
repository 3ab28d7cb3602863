// Lesson 11. Some tokens of each of N sequences through a gated delta net: convolution, delta rule, norm and gates,
// both states in place or from one slot to another.
//
// Token after token, in prompts as in decode steps: so neither a chunk's size nor a neighbour changes a bit. A head's
// state is read from memory once and written once, and between a prompt's tokens some columns of it stay in the first
// cache. Everything is computed in float32; a value is rounded only when it is stored.

#pragma once
#include "../layers/fused.h"
#include "feeds.h"

extern "C" {
struct StepSizes {
    int64_t key_heads, value_heads, key_dim, value_dim, taps;
    int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
};
struct Gates {
    const float *rate, *dt_bias, *norm;   // exp(A_log) and dt_bias [value_heads], the norm's weight [value_dim]
    float eps;
};
}

constexpr int64_t TOKENS = 64;  // of a prompt that are convolved before the states of their heads move on
constexpr int COLUMNS = 2;      // vectors of a state's columns that stay in the first cache meanwhile

template <typename T>
struct DeltaStep {
    const StepSizes& s;
    const Gates& gates;
    const T* qkv;              // [rows, channels]: q of every key head, k of every key head, v of every value head;
                               // behind them z [value_heads * value_dim], b and a [value_heads]
    int64_t stride;            // from one of its rows to the next
    const float* weight;       // [taps, channels]
    T* conv;                   // [slots, channels, taps - 1], the latest input last
    float* recurrent;          // [slots, value_heads, key_dim, value_dim]
    T* out;                    // [rows, value_heads, value_dim], rows `out_stride` apart
    int64_t out_stride;

    struct Part {  // some tokens of a sequence: rows row ... row + count - 1, the state before them, and the one behind
        int64_t row, count, source, slot;
    };

    struct Workspace {  // one thread's, for as many tokens as a part has
        std::vector<float> q, k, v, o, left, part, window, columns;
        Workspace(const StepSizes& s, int64_t tokens)
            : q(tokens * s.key_dim), k(tokens * s.key_dim), v(tokens * s.value_dim), o(tokens * s.value_dim),
              left(tokens), part(tokens), window((tokens + s.taps - 1) * std::max(s.key_dim, s.value_dim)),
              columns(tokens > 1 ? s.key_dim * COLUMNS * LANES : 0) {}
    };

    // Channels begin ... begin + n - 1 of a part: convolve with the inputs kept, keep the new last ones, SiLU.
    void convolve(const Part& p, int64_t begin, int64_t n, Workspace& w, float* to) const {
        const int64_t channels = s.channels(), kept = s.taps - 1;
        const T *x = qkv + p.row * stride + begin, *before = conv + (p.source * channels + begin) * kept;
        T* state = conv + (p.slot * channels + begin) * kept;
        float* window = w.window.data();
        for (int64_t c = 0; c < n; c++)
            for (int64_t i = 0; i < kept; i++) window[i * n + c] = widen(before[c * kept + i]);
        for (int64_t t = 0; t < p.count; t++)
            for (int64_t c = 0; c < n; c += LANES)
                store_some(window + (kept + t) * n + c, load_some(x + t * stride + c, n - c), n - c);
        for (int64_t t = 0; t < p.count; t++, to += n)
            for (int64_t c = 0; c < n; c += LANES) {
                const auto product = [&](int64_t i) {
                    return load_some(weight + i * channels + begin + c, n - c) *
                           load_some(window + (t + i) * n + c, n - c);
                };
                vec sum = product(kept);
                for (int64_t i = 0; i < kept; i++) sum += product(i);
                store_some(to + c, silu(sum), n - c);
            }
        for (int64_t c = 0; c < n; c++)
            for (int64_t i = 0; i < kept; i++) narrow(window[(p.count + i) * n + c], state + c * kept + i);
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

    // WIDE vectors of a state's columns, `count` numbers in a row: of each token fade, write the difference to v, read
    // with q, and read what the next token's k finds. Before a first token, whose state comes from memory, the next
    // head's state, which lies behind this one, is prefetched: memory is never idle.
    template <int WIDE>
    void advance(const float* before, float* state, int64_t tokens, int64_t j, int64_t count, Workspace& w) const {
        const int64_t dim = s.value_dim;
        const auto load_row = [&](const float* at, int v) {
            return WIDE > 1 ? load(at + v * LANES) : load_some(at, count);
        };
        const auto store_row = [&](float* at, int v, vec x) {
            WIDE > 1 ? store(at + v * LANES, x) : store_some(at, x, count);
        };
        const float *q = w.q.data(), *k = w.k.data(), *values = w.v.data() + j;
        vec known[WIDE] = {};
        for (int64_t i = 0; i < s.key_dim; i++)
            for (int v = 0; v < WIDE; v++) known[v] += load_row(before + i * dim, v) * k[i];
        const float* from = before;
        int64_t from_stride = dim;
        for (int64_t t = 0; t < tokens; t++, q += s.key_dim, k += s.key_dim, values += dim) {
            const bool first = t == 0, last = t + 1 == tokens;
            float* to = last ? state : w.columns.data();
            const int64_t to_stride = last ? dim : WIDE * LANES;
            const float left = w.left[t], *next = k + s.key_dim;
            vec delta[WIDE], read[WIDE] = {}, found[WIDE] = {};
            for (int v = 0; v < WIDE; v++) delta[v] = (load_row(values, v) - known[v] * left) * w.part[t];
            const auto pass = [&](auto FIRST, auto LAST) __attribute__((always_inline)) {
                for (int64_t i = 0; i < s.key_dim; i++)
                    for (int v = 0; v < WIDE; v++) {
                        const float* at = from + i * from_stride;
                        if (FIRST) prefetch(at + v * LANES + s.key_dim * dim);
                        const vec now = load_row(at, v) * left + delta[v] * k[i];
                        store_row(to + i * to_stride, v, now);
                        read[v] += now * q[i];
                        if (!LAST) found[v] += now * next[i];
                    }
            };
            constexpr std::true_type yes;
            constexpr std::false_type no;
            last ? first ? pass(yes, yes) : pass(no, yes) : first ? pass(yes, no) : pass(no, no);
            for (int v = 0; v < WIDE; v++) store_row(w.o.data() + t * dim + j, v, read[v]), known[v] = found[v];
            from = to, from_stride = to_stride;
        }
    }

    const T* z(int64_t row) const { return qkv + row * stride + s.channels(); }
    const T* b(int64_t row) const { return z(row) + s.value_heads * s.value_dim; }
    const T* a(int64_t row) const { return b(row) + s.value_heads; }
    float faded(int64_t row, int64_t h) const {  // the logarithm of what is left of the state
        const float x = widen(a(row)[h]) + gates.dt_bias[h];
        return -gates.rate[h] * (x > 20 ? x : std::log1p(std::exp(x)));
    }
    float written(int64_t row, int64_t h) const {  // how much of the difference
        return 1 / (1 + std::exp(-widen(b(row)[h])));
    }

    void finish(int64_t row, int64_t h, const float* o) const {
        T* to = out + row * out_stride + h * s.value_dim;
        const T* gate = z(row) + h * s.value_dim;
        const float factor = inverse_rms(o, s.value_dim, gates.eps);
        for (int64_t j = 0; j < s.value_dim; j += LANES) {
            const int64_t left = s.value_dim - j;
            const vec normed = load_some(o + j, left) * factor * load_some(gates.norm + j, left);
            store_some(to + j, normed * silu(load_some(gate + j, left)), left);
        }
    }

    void value_head(const Part& p, int64_t h, Workspace& w) const {
        convolve(p, 2 * s.key_heads * s.key_dim + h * s.value_dim, s.value_dim, w, w.v.data());
        for (int64_t t = 0; t < p.count; t++) {
            w.left[t] = std::exp(faded(p.row + t, h));
            w.part[t] = written(p.row + t, h);
        }
        const int64_t size = s.key_dim * s.value_dim;
        const float* before = recurrent + (p.source * s.value_heads + h) * size;
        float* state = recurrent + (p.slot * s.value_heads + h) * size;
        int64_t j = 0;
        const auto columns = [&](auto wide) {
            for (const int64_t n = wide * LANES; j + n <= s.value_dim; j += n)
                advance<wide>(before + j, state + j, p.count, j, n, w);
        };
        if (p.count == 1) columns(std::integral_constant<int, 8>{});  // long rows are read from memory faster
        columns(std::integral_constant<int, COLUMNS>{});
        for (; j < s.value_dim; j += LANES) advance<1>(before + j, state + j, p.count, j, s.value_dim - j, w);
        for (int64_t t = 0; t < p.count; t++) finish(p.row + t, h, w.o.data() + t * s.value_dim);
    }

    void key_head(const Feeds& f, int64_t i, int64_t head, Workspace& w) const {
        const int64_t keys = s.key_heads * s.key_dim, group = s.value_heads / s.key_heads, all = count_of(f, i);
        int64_t source = f.sources[i];
        for (int64_t first = 0; first < all; first += TOKENS, source = f.slots[i]) {
            const Part p{row_of(f, i) + first, std::min(TOKENS, all - first), source, f.slots[i]};
            convolve(p, head * s.key_dim, s.key_dim, w, w.q.data());
            convolve(p, keys + head * s.key_dim, s.key_dim, w, w.k.data());
            for (int64_t t = 0; t < p.count; t++) {
                normalize(w.q.data() + t * s.key_dim, s.key_dim, 1 / std::sqrt(float(s.key_dim)));
                normalize(w.k.data() + t * s.key_dim, s.key_dim, 1);
            }
            for (int64_t h = head * group; h < (head + 1) * group; h++) value_head(p, h, w);
        }
    }

    // Called by all threads of a team. Each takes consecutive heads of consecutive sequences, about as many tokens as
    // others.
    void run(const Feeds& f) const {
        const int64_t team = team_size(), me = thread_number();
        int64_t all = 0, before = 0;
        for (int64_t i = 0; i < f.sequences; i++) all += count_of(f, i) * s.key_heads;
        Workspace w(s, std::min(TOKENS, f.longest));
        for (int64_t i = 0; i < f.sequences; i++)
            for (int64_t head = 0; head < s.key_heads; head++, before += count_of(f, i))
                if (before * team / all == me) key_head(f, i, head, w);
        barrier();
    }
    void run(const Feeds* feeds, int64_t count) const {  // a later one may go on with what one before has left
        for (int64_t i = 0; i < count; i++) run(feeds[i]);
    }
};
