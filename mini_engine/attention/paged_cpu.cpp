// Lesson 3. Paged attention for processors: no gather, every key and value is used where it lies.
//
// A task is a tile of one sequence's queries, for some key/value heads, over a stretch of the history. Within it the
// history goes by in tiles of as many keys as a vector has lanes:
//
//   keys, transposed: lane j holds key j                      load_keys
//   scores[row] = q[row] . keys, all lanes at once            score
//   one online-softmax update for the whole tile              softmax_update   (Milakov and Gimelshein, 2018)
//   sums[row] += weights[row][j] * value[j]                   add_values
//
// "Rows" are the tile's queries times the query heads that share the key/value head: all of them use each load.
//
// A row is summed in an order that its history alone decides: tiles of LANES keys, stretches of SPLIT keys, merged first
// to last (flash-decoding: Dao et al., 2023). Threads, neighbours, chunk size and block size change no bit of it.

#include "vectors.h"

#include <type_traits>
#include <vector>

#define NOINLINE __attribute__((noinline))  // one copy, so that every caller rounds alike
constexpr int SPLIT = 512;                  // keys in a stretch of history
constexpr int MAX_ROWS = 64;                // rows in a task, unless one query's group alone has more
constexpr float NO_KEY_YET = -1e30f;        // a row's first maximum: finite, so that subtracting it never gives NaN

// A row's running sums lie in one record: the maximum score, the sum of weights, then the weighted sum of values.
enum { MAXIMUM, WEIGHT, VALUES };

// ---------------------------------------------------------------- one tile of keys

// keys[d * LANES + j] = element d of key j; zero for d past the head dimension.
INLINE void load_keys(const float* const* key, int64_t at, int dim, float* keys) {
    for (int d = 0; d < dim; d += LANES) {
        vec x[LANES];
        for (int j = 0; j < LANES; j++) x[j] = load(key[j] + at + d, dim - d);
        transpose(x);
        for (int i = 0; i < LANES; i++) store(keys + (d + i) * LANES, x[i]);
    }
}
INLINE void load_keys(const bf16* const* key, int64_t at, int dim, float* keys) {
    for (int d = 0; d < dim; d += 2 * LANES) {  // two elements travel in one 32-bit lane and part afterwards
        ivec x[LANES];
        for (int j = 0; j < LANES; j++) x[j] = load_some<ivec>(key[j] + at + d, dim - d);
        transpose(x);
        for (int i = 0; i < LANES; i++) {
            store(keys + (d + 2 * i) * LANES, (vec)(x[i] << 16));
            store(keys + (d + 2 * i + 1) * LANES, (vec)(x[i] & int32_t(0xffff0000)));
        }
    }
}

template <int R>
INLINE void score(const float* q, const float* keys, int dim, int width, float* scores) {
    vec even[R] = {}, odd[R] = {};  // two sums a row, so that more multiplications are under way at once
    for (int d = 0; d < dim; d += 2) {
        const vec k0 = load(keys + d * LANES), k1 = load(keys + (d + 1) * LANES);
        for (int r = 0; r < R; r++) {
            even[r] += k0 * q[r * width + d];
            odd[r] += k1 * q[r * width + d + 1];
        }
    }
    for (int r = 0; r < R; r++) store(scores + r * LANES, even[r] + odd[r]);
}

// Scores become weights 2^(score - maximum); what was summed under a smaller maximum is scaled down first.
// `lanes` is the sum of weights, still spread over the lanes.
static NOINLINE void softmax_update(float* scores, int visible, int width, float* sums, float* lanes) {
    ivec lane;
    for (int j = 0; j < LANES; j++) lane[j] = j;
    const vec s = lane < ivec{} + visible ? load(scores) : vec{} - INFINITY;
    const float top = std::max(sums[MAXIMUM], fold_lanes(s, larger)[0]);
    if (top != sums[MAXIMUM]) {
        const vec factor = exp2(vec{} + (sums[MAXIMUM] - top));
        store(lanes, load(lanes) * factor);
        for (int d = VALUES; d < VALUES + width; d += LANES) store(sums + d, load(sums + d) * factor);
        sums[MAXIMUM] = top;
    }
    const vec weights = exp2(s - top);
    store(lanes, load(lanes) + weights);
    store(scores, weights);
}

template <int R, typename T>
INLINE void add_values(const float* weights, const T* const* value, int64_t at, int count, int dim, int record,
                       float* sums) {
    constexpr int V = R > 2 ? 2 : 4;  // vectors along the head at a time: R * V sums stay in registers
    for (int d = 0; d < dim; d += V * LANES) {
        vec sum[R][V];
        for (int r = 0; r < R; r++)
            for (int i = 0; i < V; i++) sum[r][i] = load(sums + r * record + VALUES + d + i * LANES);
        for (int j = 0; j < count; j++)
            for (int i = 0; i < V; i++) {
                const vec v = load(value[j] + at + d + i * LANES, dim - d - i * LANES);
                for (int r = 0; r < R; r++) sum[r][i] += v * weights[r * LANES + j];
            }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < V; i++) store(sums + r * record + VALUES + d + i * LANES, sum[r][i]);
    }
}

template <typename F>
INLINE void for_rows(int rows, F f) {  // f(how many, the first), in groups whose size the compiler knows
    int r = 0;
    for (; r + ROWS <= rows; r += ROWS) f(std::integral_constant<int, ROWS>{}, r);
    for (; r + 2 <= rows; r += 2) f(std::integral_constant<int, 2>{}, r);
    if (r < rows) f(std::integral_constant<int, 1>{}, r);
}

// ---------------------------------------------------------------- sums over a stretch

static void clear(float* sums, int rows, int record) {
    std::fill(sums, sums + int64_t(rows) * record, 0.f);
    for (int r = 0; r < rows; r++) sums[int64_t(r) * record + MAXIMUM] = NO_KEY_YET;
}

static NOINLINE void merge(float* sums, const float* next, int rows, int record) {
    for (int r = 0; r < rows; r++, sums += record, next += record) {
        const float top = std::max(sums[MAXIMUM], next[MAXIMUM]);
        const vec a = exp2(vec{} + (sums[MAXIMUM] - top)), b = exp2(vec{} + (next[MAXIMUM] - top));
        sums[MAXIMUM] = top;
        sums[WEIGHT] = sums[WEIGHT] * a[0] + next[WEIGHT] * b[0];
        for (int d = VALUES; d < record; d += LANES) store(sums + d, load(sums + d) * a + load(next + d) * b);
    }
}

// ---------------------------------------------------------------- tasks

struct Tile {  // some queries of one sequence, for some key/value heads
    int seq, first_query, queries, first_head, heads;
    int64_t parts;  // where the sums of its stretches lie, if it was cut into several tasks; else -1
};
struct Task {  // a tile over the keys begin ... end - 1
    int tile, begin, end;
};

template <typename T>
struct Attention {
    const T *q, *k, *v;
    T* out;
    const int32_t *starts, *kv_lens, *table;
    int num_seqs, num_rows, heads, kv_heads, dim, num_blocks, block_size, max_blocks;
    int64_t q_stride;
    float scale;

    int group() const { return heads / kv_heads; }
    int width() const { return (dim + 4 * LANES - 1) / (4 * LANES) * (4 * LANES); }  // the head dimension, padded
    int record() const { return VALUES + width(); }
    int q_len(int seq) const { return starts[seq + 1] - starts[seq]; }
    int rows(const Tile& t) const { return t.heads * t.queries * group(); }  // by head, then query, then group member
    int keys_seen(const Tile& t, int query) const { return kv_lens[t.seq] - q_len(t.seq) + t.first_query + query + 1; }
    int64_t row_at(const Tile& t, int row, int64_t stride) const {  // where a row's query begins
        const int member = row % group(), query = row / group() % t.queries, head = row / group() / t.queries;
        return (starts[t.seq] + t.first_query + query) * stride + ((t.first_head + head) * group() + member) * dim;
    }

    struct Places {  // where some consecutive tokens' keys and values lie; spare lanes repeat the first
        const T *key[LANES], *value[LANES];
        int count;
    };
    Places places(int seq, int begin, int end) const {
        Places p;
        p.count = std::max(0, std::min(LANES, end - begin));
        for (int j = 0; j < LANES && p.count; j++) {
            const int token = j < p.count ? begin + j : begin;
            const int64_t block = table[int64_t(seq) * max_blocks + token / block_size];
            const int64_t at = (block * block_size + token % block_size) * kv_heads * dim;
            p.key[j] = k + at, p.value[j] = v + at;
        }
        return p;
    }

    struct Workspace {  // one thread's
        std::vector<float> q, keys, scores, lanes, part, sums;
        explicit Workspace(const Attention& a) {
            const int64_t rows = std::max(MAX_ROWS, a.group()), width = a.width();
            q.resize(rows * width), keys.resize(width * LANES), scores.resize(rows * LANES), lanes.resize(rows * LANES);
            part.resize(rows * a.record()), sums.resize(rows * a.record());
        }
    };

    void attend(const Tile& t, int begin, int end, float* sums, Workspace& w) const {
        for (int r = 0; r < rows(t); r++)
            for (int d = 0; d < dim; d++) w.q[r * width() + d] = widen(q[row_at(t, r, q_stride) + d]) * scale;
        clear(sums, rows(t), record());
        for (int stretch = begin; stretch < end; stretch += SPLIT) {
            const int stop = std::min(end, stretch + SPLIT);
            clear(w.part.data(), rows(t), record());
            std::fill(w.lanes.begin(), w.lanes.end(), 0.f);
            Places now = places(t.seq, stretch, stop);
            for (int key = stretch; key < stop; key += LANES) {
                const Places next = places(t.seq, key + LANES, end);
                for (int head = 0; head < t.heads; head++) add_tile(t, head, key, now, next, w);
                now = next;
            }
            for (int r = 0; r < rows(t); r++)
                w.part[r * record() + WEIGHT] = fold_lanes(load(&w.lanes[r * LANES]), plus)[0];
            merge(sums, w.part.data(), rows(t), record());
        }
    }

    void add_tile(const Tile& t, int head, int key, const Places& now, const Places& next, Workspace& w) const {
        const int n = t.queries * group(), first = head * n, wide = width(), rec = record();
        const int64_t at = int64_t(t.first_head + head) * dim;
        float *q = &w.q[first * wide], *scores = &w.scores[first * LANES], *sums = &w.part[first * rec];
        for (int j = 0; j < next.count; j++)
            for (int d = 0; d < dim; d += 64 / int(sizeof(T))) {  // 64 bytes are a cache line
                __builtin_prefetch(next.key[j] + at + d);
                __builtin_prefetch(next.value[j] + at + d);
            }
        load_keys(now.key, at, dim, w.keys.data());
        for_rows(n, [&](auto R, int r) { score<R>(q + r * wide, w.keys.data(), dim, wide, scores + r * LANES); });
        for (int r = 0; r < n; r++)
            softmax_update(scores + r * LANES, keys_seen(t, r / group()) - key, wide, sums + r * rec,
                           &w.lanes[(first + r) * LANES]);
        for_rows(n, [&](auto R, int r) {
            add_values<R>(scores + r * LANES, now.value, at, now.count, dim, rec, sums + r * rec);
        });
    }

    void finish(const Tile& t, const float* sums) const {
        for (int r = 0; r < rows(t); r++, sums += record())
            for (int d = 0; d < dim; d++) narrow(sums[VALUES + d] / sums[WEIGHT], out + row_at(t, r, heads * dim) + d);
    }

    // ------------------------------------------------------------ the whole batch

    int foreign_block() const {  // the first sequence whose table names a block that the cache does not have, or -1
        for (int s = 0; s < num_seqs; s++)
            for (int i = 0; q_len(s) && i < (kv_lens[s] + block_size - 1) / block_size; i++)
                if (const int b = table[int64_t(s) * max_blocks + i]; b < 0 || b >= num_blocks) return s;
        return -1;
    }

    // Many heads a tile read the cache in long runs, one head a tile gives more tasks; the results are the same.
    void cut(int threads, std::vector<Tile>& tiles, std::vector<Task>& tasks, int64_t& floats) const {
        const int queries = std::max(1, MAX_ROWS / group());
        int64_t stretches = 0;
        for (int s = 0; s < num_seqs; s++) stretches += (kv_lens[s] + SPLIT - 1) / SPLIT;
        for (int s = 0; s < num_seqs; s++)
            for (int first = 0; first < q_len(s); first += queries) {
                const int count = std::min(queries, q_len(s) - first);
                int per = std::min(kv_heads, std::max(1, MAX_ROWS / (count * group())));
                while (per > 1 && stretches * kv_heads < int64_t(4) * threads * per) per = (per + 1) / 2;
                for (int head = 0; head < kv_heads; head += per)
                    add_tasks({s, first, count, head, std::min(per, kv_heads - head), -1}, tiles, tasks, floats);
            }
    }

    void add_tasks(Tile t, std::vector<Tile>& tiles, std::vector<Task>& tasks, int64_t& floats) const {
        const int end = keys_seen(t, t.queries - 1), tile = int(tiles.size());
        const bool several = t.queries == q_len(t.seq) && end > SPLIT;  // long prompts have tiles enough
        if (several) t.parts = floats;
        for (int begin = 0; begin < end; begin += several ? SPLIT : end) {
            tasks.push_back({tile, begin, several ? std::min(end, begin + SPLIT) : end});
            floats += several ? rows(t) * record() : 0;
        }
        tiles.push_back(t);
    }

    void run(int threads) const {
        std::vector<Tile> tiles;
        std::vector<Task> tasks;
        int64_t floats = 0;
        cut(threads, tiles, tasks, floats);
        std::vector<float> parts(floats);
        const int num_tasks = int(tasks.size()), num_tiles = int(tiles.size());
#pragma omp parallel num_threads(threads) if (num_tasks > 1)
        {
            Workspace w(*this);
#pragma omp for schedule(dynamic)
            for (int i = 0; i < num_tasks; i++) {
                const Task& task = tasks[i];
                const Tile& t = tiles[task.tile];
                float* sums = t.parts < 0 ? w.sums.data() : &parts[t.parts + task.begin / SPLIT * rows(t) * record()];
                attend(t, task.begin, task.end, sums, w);
                if (t.parts < 0) finish(t, sums);
            }
#pragma omp for
            for (int i = 0; i < num_tiles; i++) {
                const Tile& t = tiles[i];
                if (t.parts < 0) continue;
                float* sums = &parts[t.parts];
                const int size = rows(t) * record();
                for (int n = 1; n * SPLIT < keys_seen(t, t.queries - 1); n++) merge(sums, sums + n * size, rows(t), record());
                finish(t, sums);
            }
        }
        const int64_t done = int64_t(starts[num_seqs]) * heads * dim;
        memset((void*)(out + done), 0, (int64_t(num_rows) * heads * dim - done) * sizeof(T));
    }
};

template <typename T>
static int run(const void* q, const void* k, const void* v, void* out, const int32_t* starts, const int32_t* kv_lens,
               const int32_t* table, const int64_t* size, float scale, int threads) {
    const Attention<T> a{(const T*)q, (const T*)k, (const T*)v, (T*)out, starts, kv_lens, table,
                         int(size[0]), int(size[1]), int(size[2]), int(size[3]), int(size[4]),
                         int(size[5]), int(size[6]), int(size[7]), size[8], scale * 1.44269504088896f};  // log2(e)
    const int foreign = a.foreign_block();
    if (foreign < 0) a.run(threads);
    return foreign;
}

// size: num_seqs, num_rows, heads, kv_heads, dim, num_blocks, block_size, max_blocks, q_stride.
// Returns -1, or the sequence whose block table names a block that does not exist; then nothing was written.
extern "C" int paged_attention_f32(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                                   const int32_t* kv_lens, const int32_t* table, const int64_t* size, float scale,
                                   int threads) {
    return run<float>(q, k, v, out, starts, kv_lens, table, size, scale, threads);
}
extern "C" int paged_attention_bf16(const void* q, const void* k, const void* v, void* out, const int32_t* starts,
                                    const int32_t* kv_lens, const int32_t* table, const int64_t* size, float scale,
                                    int threads) {
    return run<bf16>(q, k, v, out, starts, kv_lens, table, size, scale, threads);
}
