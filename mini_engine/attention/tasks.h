// Lesson 3. One call's work: tiles of queries, tasks over stretches of the history, and the threads that share them.
//
// A row is summed in an order that its history alone decides: tiles of LANES keys, stretches of SPLIT keys, merged
// first to last (flash-decoding: Dao et al., 2023). Threads, neighbours, chunk size and block size change no bit of it,
// nor does a beginning that is computed once for a run of sequences (runs.h).
//
// What the cache holds is a parameter: C is T itself here, and lesson 17 adds compressed ones.

#pragma once
#include "runs.h"
#include "tile.h"

constexpr int SPLIT = 512;     // keys in a stretch of history
constexpr int MAX_ROWS = 128;  // rows in a task, unless one query's group alone has more
constexpr int MANY_ROWS = 8;   // from here on it pays to transpose the keys and to pack the values

struct alignas(4 * LANES) Vector {  // memory in whole vectors: one that lay across two cache lines would cost two loads
    float lane[LANES];
};
struct Floats : std::vector<Vector> {
    explicit Floats(int64_t n) : std::vector<Vector>((n + LANES - 1) / LANES) {}
    float* at(int64_t i) { return (float*)data() + i; }
};

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
        for (int d = WEIGHTS; d < record; d += LANES) store(sums + d, load(sums + d) * a + load(next + d) * b);
    }
}

// ---------------------------------------------------------------- tasks

struct Tile {  // some queries of one sequence, or one of each of a run's, for some key/value heads
    int seq, first_query, queries, first_head, heads;
    int64_t parts = -1, apart = 0;  // where its stretches' sums lie, and how far apart, if they are kept; else -1
    const Run* run = nullptr;       // whose beginning it computes, or goes on from
    bool begins = false;            // it computes it
};
struct Task {  // a tile over the keys begin ... end - 1
    int tile, begin, end;
};

template <typename T, typename C = T>  // q and out hold T, the cache C
struct Attention {
    using E = typename Words<C>::Element;  // C, or T if each row is opened, once, before the loops over it
    static constexpr bool OPENS = !std::is_same_v<E, C>;

    const T* q;
    const C *k, *v;
    T* out;
    const int32_t *starts, *kv_lens, *table;
    int num_seqs, num_rows, heads, kv_heads, dim, block_size, max_blocks;
    int64_t q_stride, out_stride, window;
    float scale;

    int group() const { return heads / kv_heads; }
    int width() const {  // dim, padded to whole loads
        return (dim * int(sizeof(T)) + 4 * LANES - 1) / (4 * LANES) * PER_LOAD<T> * LANES;
    }
    int words() const {  // in a query, in a key
        if constexpr (CODED<C>) return CodeScores<C>::query_words(dim);
        return words_in(width());
    }
    static constexpr int words_in(int width) { return width * Words<T>::PIECES / PER_LOAD<T>; }
    int64_t stride() const { return Words<C>::stride(dim); }  // from one head to the next
    int record() const {
        if constexpr (CODED<C>) return VALUES + dim + CodeValues<C>::least_sums(dim);
        return VALUES + width();
    }
    int weight_words() const {
        if constexpr (CODED<C>) return CodeValues<C>::weight_words(dim);
        return 0;
    }
    int q_len(int seq) const { return starts[seq + 1] - starts[seq]; }
    int rows(const Tile& t) const { return t.heads * t.queries * group(); }  // by head, then query, then group member
    int keys_seen(const Tile& t, int query) const {
        return t.begins ? t.run->keys : kv_lens[t.seq] - q_len(t.seq) + t.first_query + query + 1;
    }
    int64_t window_of(const Tile& t) const { return t.begins ? EVERY_KEY : window; }  // all of a run sees its beginning
    int first_seen(const Tile& t) const { return int(first_key(keys_seen(t, 0), window_of(t))); }
    int query_of(const Tile& t, int row) const { return t.first_query + row / group() % t.queries; }
    int head_of(const Tile& t, int row) const {  // of the query's heads
        return (t.first_head + row / group() / t.queries) * group() + row % group();
    }
    int64_t row_at(const Tile& t, int row, int64_t stride) const {  // where a row's query begins
        const int query = query_of(t, row);
        return (t.begins ? starts[t.run->seqs[query]] : starts[t.seq] + query) * stride + head_of(t, row) * dim;
    }

    struct Places {  // where some consecutive tokens' keys and values lie; spare lanes repeat one of them
        const C *key[LANES], *value[LANES];
        int count;
    };
    Places places(int seq, int begin, int end, int seen) const {  // those before `seen` are spare: they may be gone
        Places p;
        p.count = std::min(LANES, end - begin);
        const int first = std::max(begin, seen);
        const int32_t* block = table + int64_t(seq) * max_blocks + first / block_size;
        const int64_t each = kv_heads * stride();
        int64_t offset = first % block_size, at = (*block * int64_t(block_size) + offset) * each;
        for (int j = 0; j < LANES; j++) {
            if (j < p.count && begin + j > first) {
                at += each;
                if (++offset == block_size) offset = 0, at = *++block * int64_t(block_size) * each;
            }
            p.key[j] = k + at, p.value[j] = v + at;
        }
        return p;
    }

    struct Workspace {  // one thread's
        Floats q, keys, values, scores, stretch, sums;
        std::vector<T> row;  // one query
        Floats padded;       // keys and values of a tile, where they are opened or do not fill whole loads
        Floats weights;      // as codes are multiplied by them
        Workspace(const Attention& a, int64_t rows)
            : q(rows * a.words()), keys(LANES * a.words()), values(LANES * a.width()), scores(rows * LANES),
              stretch(rows * a.record()), sums(rows * a.record()), row(a.width()),
              padded(a.dim == a.width() && !OPENS ? 0 : 2 * LANES * a.width() * sizeof(E) / 4),
              weights(rows * a.weight_words()) {}
    };

    // One head's keys or values, opened or padded with zeros where the loops cannot read them as they are.
    CacheRows<E> open(CacheRows<C> rows, const E** row, E* to) const {
        if constexpr (!OPENS)
            if (dim == width()) return rows;
        Words<C>::open(rows, dim, to, width());
        for (int j = 0; j < LANES; j++) row[j] = to + j * width();
        return {row, 0};
    }

    void attend(const Tile& t, int begin, int end, float* sums, Workspace& w) const {
        const int seen = first_seen(t);
        const bool single = begin / SPLIT == (end - 1) / SPLIT;
        for (int r = 0; r < rows(t); r++) take_query(q + row_at(t, r, q_stride), w.row.data(), w.q.at(r * words()));
        if (!t.run || t.begins || begin % SPLIT == 0) clear(sums, rows(t), record());  // else a run's beginning goes on
        for (int first = begin, last; first < end; first = last) {
            last = std::min(end, first / SPLIT * SPLIT + SPLIT);
            float* stretch = single ? sums : w.stretch.at(0);  // which needs no merging
            if (stretch != sums) clear(stretch, rows(t), record());
            Places now = places(t.seq, first, last, seen);
            for (int key = first; key < last; key += LANES) {
                const Places next = key + LANES < end ? places(t.seq, key + LANES, end, seen) : now;
                add_tile(pass(t, key, now, next), stretch, w);
                now = next;
            }
            if (stretch != sums) merge(sums, stretch, rows(t), record());
        }
    }

    void take_query(const T* from, T* row, float* to) const {
        if constexpr (CODED<C>) {
            CodeScores<C>::take_query(from, dim, to);
        } else {
            if (dim < width()) from = (std::fill(std::copy(from, from + dim, row), row + width(), T{}), row);
            vec x[Words<T>::PIECES];
            for (int d = 0; d < width(); d += PER_LOAD<T> * LANES) {
                Words<E>::load_query(from + d, x);
                for (int p = 0; p < Words<T>::PIECES; p++, to += LANES) store(to, x[p]);
            }
        }
    }

    struct Pass {  // some keys of a tile's history, in all of its heads
        const Tile& t;
        const Places &now, &next;  // theirs, and those of the keys behind them
        int rows, first, last;     // of a head, and those that see any of these keys
        int visible;               // of these keys and those behind them, to the first of these rows
        int64_t most;              // keys that a row sees
        bool many;                 // rows
    };
    Pass pass(const Tile& t, int key, const Places& now, const Places& next) const {
        const int n = t.queries * group(), seen = keys_seen(t, 0);
        const int64_t most = window_of(t);
        const int first = std::max(0, key + 1 - seen);
        const int last = int(std::min<int64_t>(t.queries, key + LANES + most - seen));
        return {t, now, next, n, first * group(), last * group(), seen + first - key, most, n >= MANY_ROWS};
    }
    int64_t at(const Pass& p, int head) const { return (p.t.first_head + head) * stride(); }

    // A head's softmax is a long chain of operations that wait for each other: the next head's scores come in between.
    void add_tile(const Pass& p, float* stretch, Workspace& w) const {
        score_head(p, 0, w);
        for (int head = 0; head < p.t.heads; head++) {
            weigh_head(p, head, stretch, w);
            if (head + 1 < p.t.heads) score_head(p, head + 1, w);
            add_head(p, head, stretch, w);
        }
    }

    // These are not inlined: within attend's loops the compiler runs out of registers. They prefetch the same head's
    // keys and values of the next tile. A processor drops such requests while too many are under way, so add_head
    // repeats them just before they are needed.
    NOINLINE void score_head(const Pass& p, int head, Workspace& w) const {
        const CacheRows<C> keys{p.now.key, at(p, head)}, ahead{p.next.key, keys.at};
        const float* q = w.q.at(head * p.rows * words());
        float* scores = w.scores.at(head * p.rows * LANES);
        if constexpr (CODED<C>) {
            CodeScores<C>::score_all(q, keys, ahead, dim, p.first, p.last, p.many, w.keys.at(0), scores);
        } else {
            const E* row[LANES];
            const CacheRows<E> opened = open(keys, row, (E*)w.padded.at(0));
            if constexpr (OPENS)
                score_all(q, opened, opened, p, w, scores);
            else
                score_all(q, opened, ahead, p, w, scores);
        }
    }

    void weigh_head(const Pass& p, int head, float* stretch, Workspace& w) const {
        const CacheRows<C> keys{p.now.key, at(p, head)}, values{p.now.value, keys.at};
        float* scores = w.scores.at(head * p.rows * LANES);
        float* sums = stretch + head * p.rows * record();
        softmax_update<E>(scores + p.first * LANES, p.last - p.first, scale * Words<C>::scales(keys, dim),
                          CODED<C> ? vec{} + 1.f : Words<C>::scales(values, dim), p.visible, int(p.most), group(),
                          sums + p.first * record(), record());
    }

    NOINLINE void add_head(const Pass& p, int head, float* stretch, Workspace& w) const {
        const CacheRows<C> values{p.now.value, at(p, head)}, ahead{p.next.value, values.at};
        const float* scores = w.scores.at(head * p.rows * LANES);
        float* sums = stretch + head * p.rows * record();
        prefetch_head(head + 2 < p.t.heads ? p.now : p.next, at(p, (head + 2) % p.t.heads));
        if constexpr (OPENS) prefetch_head(p.next, values.at);
        if constexpr (CODED<C>) {
            CodeValues<C>::add_all(scores, values, ahead, dim, p.first, p.last, p.many, w.values.at(0),
                                   w.weights.at(0), record(), sums);
        } else {
            const E* row[LANES];
            const CacheRows<E> opened = open(values, row, (E*)w.padded.at(0) + LANES * width());
            if constexpr (OPENS)
                add_all(InCache<E>{opened, opened}, p, w, scores, sums);
            else
                add_all(InCache<E>{opened, ahead}, p, w, scores, sums);
        }
    }

    // Rows of the usual width have loops of their own, whose length the compiler knows.
    void score_all(const float* q, CacheRows<E> key, CacheRows<E> ahead, const Pass& p, Workspace& w,
                   float* scores) const {
        const auto few = [&](int words) __attribute__((always_inline)) {
            for_rows(p.first, p.last, [&](auto R, int r) __attribute__((always_inline)) {
                if (!OPENS && r == p.first)
                    score<R, true>(q + r * words, key, ahead, words, scores + r * LANES);
                else
                    score<R, false>(q + r * words, key, ahead, words, scores + r * LANES);
            });
        };
        if (!p.many) return width() == USUAL_DIM ? few(words_in(USUAL_DIM)) : few(words());
        transpose_keys(key, ahead, words(), w.keys.at(0));
        for_rows(p.first, p.last, [&](auto R, int r) {
            score_transposed<R, E>(q + r * words(), w.keys.at(0), words(), scores + r * LANES);
        });
    }
    void add_all(InCache<E> values, const Pass& p, Workspace& w, const float* scores, float* sums) const {
        const int count = p.now.count;
        const auto add = [&](const auto& values, int width) __attribute__((always_inline)) {
            for_rows(p.first, p.last, [&](auto R, int r) __attribute__((always_inline)) {
                add_values<R, SUMS / R, E>(scores + r * LANES, values, !OPENS && r == p.first, count, 0, width,
                                           record(), sums + r * record() + VALUES);
            });
        };
        if (p.many) return add(pack_values(values, count, width(), w.values.at(0)), width());
        width() == USUAL_DIM ? add(values, USUAL_DIM) : add(values, width());
    }

    // Inlined always: GCC takes a function that only prefetches for one without effect, and drops the call.
    __attribute__((always_inline)) void prefetch_head(const Places& p, int64_t at) const {
        const auto rows = [&](int64_t size) __attribute__((always_inline)) {  // of so many bytes
            for (int j = 0; j < LANES; j++) {
                const char *key = (const char*)(p.key[j] + at), *value = (const char*)(p.value[j] + at);
                UNROLL for (int64_t i = 0; i + 64 < size; i += 64) prefetch(key + i), prefetch(value + i);
                prefetch(key + size - 1), prefetch(value + size - 1);
            }
        };
        dim == USUAL_DIM ? rows(Words<C>::stride(USUAL_DIM) * sizeof(C)) : rows(stride() * sizeof(C));
    }

    void finish(const Tile& t, const float* sums, Workspace& w) const {
        for (int r = 0; r < rows(t); r++, sums += record()) finish_row(sums, out + row_at(t, r, out_stride), w);
    }
    void finish_row(const float* sums, T* to, Workspace& w) const {
        if constexpr (CODED<C>) {
            CodeValues<C>::finish(sums, dim, to);
        } else {
            const float weight = fold_lanes(load(sums + WEIGHTS), plus)[0];
            vec x[PER_LOAD<T>];
            T* row = dim < width() ? w.row.data() : to;
            for (int d = 0; d < width(); d += PER_LOAD<T> * LANES) {
                for (int p = 0; p < PER_LOAD<T>; p++) x[p] = load(sums + VALUES + d + p * LANES) / weight;
                Words<E>::store_values(row + d, x);
            }
            if (row != to) std::copy(row, row + dim, to);
        }
    }

    // ------------------------------------------------------------ the whole batch

    struct Work {
        std::vector<Tile> tiles;
        std::vector<Task> tasks, after;  // after: what goes on where a run's beginning ends
        int64_t floats = 0;              // of the stretches' sums
    };

    // Many heads a tile read the cache in long runs, one head a tile gives more tasks; the results are the same.
    int heads_a_tile(int rows, int64_t pieces, int threads) const {
        int per = std::min(kv_heads, std::max(1, MAX_ROWS / rows));
        while (per > 1 && pieces * kv_heads < int64_t(4) * threads * per) per = (per + 1) / 2;
        return per;
    }

    void cut(const std::vector<Run>& runs, int threads, Work& work) const {
        std::vector<char> is_done(num_seqs);
        for (const Run& run : runs) {
            cut_run(run, threads, work);
            for (int s : run.seqs) is_done[s] = true;
        }
        const int queries = std::max(1, MAX_ROWS / group());
        int64_t stretches = 0;
        for (int s = 0; s < num_seqs; s++)
            stretches += (kv_lens[s] - first_key(kv_lens[s] - q_len(s) + 1, window) + SPLIT - 1) / SPLIT;
        for (int s = 0; s < num_seqs; s++)
            for (int first = 0; first < q_len(s) && !is_done[s]; first += queries) {
                const int count = std::min(queries, q_len(s) - first);
                const int per = heads_a_tile(count * group(), stretches, threads);
                for (int head = 0; head < kv_heads; head += per)
                    add_tasks({s, first, count, head, std::min(per, kv_heads - head)}, work);
            }
    }

    void add_tasks(Tile t, Work& work) const {
        const int end = keys_seen(t, t.queries - 1), tile = int(work.tiles.size());
        const int begin = first_seen(t) / LANES * LANES, stretch = begin / SPLIT * SPLIT;
        const bool several = t.queries == q_len(t.seq) && end > stretch + SPLIT;  // long prompts have tiles enough
        if (several) t.parts = work.floats, t.apart = int64_t(rows(t)) * record();
        for (int first = stretch, last; first < end; first = last) {
            last = several ? std::min(end, first + SPLIT) : end;
            work.tasks.push_back({tile, std::max(first, begin), last});
            work.floats += t.apart;
        }
        work.tiles.push_back(t);
    }

    // A run's sums lie by stretch, sequence and head. Tiles of all its queries fill in the beginning, and each
    // sequence's own tiles what follows.
    void cut_run(const Run& run, int threads, Work& work) const {
        const int count = int(run.seqs.size()), most = std::max(1, MAX_ROWS / group());
        const int64_t each = int64_t(heads) * record(), apart = count * each, parts = work.floats;
        int longest = 0;
        for (int s : run.seqs) longest = std::max(longest, kv_lens[s]);
        work.floats += (longest + SPLIT - 1) / SPLIT * apart;
        for (int first = 0; first < count; first += most) {
            const int queries = std::min(most, count - first);
            const int per = heads_a_tile(queries * group(), (run.keys + SPLIT - 1) / SPLIT, threads);
            for (int head = 0; head < kv_heads; head += per) {
                for (int key = 0; key < run.keys; key += SPLIT)
                    work.tasks.push_back({int(work.tiles.size()), key, std::min(key + SPLIT, run.keys)});
                work.tiles.push_back({run.seqs[0], first, queries, head, std::min(per, kv_heads - head), parts, apart,
                                      &run, true});
            }
        }
        const int per = heads_a_tile(group(), count, threads);
        for (int i = 0; i < count; i++)
            for (int head = 0; head < kv_heads; head += per) {
                const int s = run.seqs[i], tile = int(work.tiles.size());
                for (int key = run.keys, last; key < kv_lens[s]; key = last) {
                    last = std::min(key / SPLIT * SPLIT + SPLIT, kv_lens[s]);
                    (key % SPLIT ? work.after : work.tasks).push_back({tile, key, last});
                }
                work.tiles.push_back({s, 0, 1, head, std::min(per, kv_heads - head),
                                      parts + i * each + int64_t(head) * group() * record(), apart, &run});
            }
    }

    int stretches_before(const Tile& t, int key) const { return key / SPLIT - first_seen(t) / SPLIT; }  // the key's own

    void carry_out(const Task& task, const Tile& t, Floats& parts, Workspace& w) const {
        const int64_t at = t.parts + stretches_before(t, task.begin) * t.apart;
        float* sums = t.parts < 0 || t.begins ? w.sums.at(0) : parts.at(at);
        attend(t, task.begin, task.end, sums, w);
        if (t.begins) return hand_out(t, sums, parts.at(at));
        if (t.parts < 0) finish(t, sums, w);
    }

    void hand_out(const Tile& t, const float* sums, float* parts) const {  // to each sequence of a run its rows
        for (int r = 0; r < rows(t); r++, sums += record())
            std::copy(sums, sums + record(), parts + (int64_t(query_of(t, r)) * heads + head_of(t, r)) * record());
    }

    void merge_stretches(const Tile& t, Floats& parts, Workspace& w) const {
        if (t.parts < 0 || t.begins) return;
        float* sums = parts.at(t.parts);
        const int more = stretches_before(t, keys_seen(t, t.queries - 1) - 1);
        for (int n = 1; n <= more; n++) merge(sums, sums + n * t.apart, rows(t), record());
        finish(t, sums, w);
    }

    void run(const std::vector<Run>& runs, int threads) const {
        Work work;
        cut(runs, threads, work);
        Floats parts(work.floats);
        const int num_tasks = int(work.tasks.size()), num_after = int(work.after.size());
        const int num_tiles = int(work.tiles.size());
        int most = 0;  // rows in a tile: memory for more would be new pages, cleared, in every call
        for (const Tile& t : work.tiles) most = std::max(most, rows(t));
#pragma omp parallel num_threads(threads) if (num_tasks > 1)
        {
            Workspace w(*this, most);
#pragma omp for schedule(dynamic)
            for (int i = 0; i < num_tasks; i++) carry_out(work.tasks[i], work.tiles[work.tasks[i].tile], parts, w);
#pragma omp for schedule(dynamic)
            for (int i = 0; i < num_after; i++) carry_out(work.after[i], work.tiles[work.after[i].tile], parts, w);
#pragma omp for
            for (int i = 0; i < num_tiles; i++) merge_stretches(work.tiles[i], parts, w);
        }
        for (int64_t r = starts[num_seqs]; r < num_rows; r++) std::fill_n(out + r * out_stride, heads * dim, T{});
    }
};

template <typename T, typename C>
static int run(const void* q, const void* k, const void* v, void* out, const int32_t* starts, const int32_t* kv_lens,
               const int32_t* table, const AttentionSizes& n, float scale, int threads) {
    const Attention<T, C> a{(const T*)q, (const C*)k, (const C*)v, (T*)out, starts, kv_lens, table,
                            int(n.num_seqs), int(n.num_rows), int(n.heads), int(n.kv_heads), int(n.dim),
                            int(n.block_size), int(n.max_blocks), n.q_stride, n.out_stride, n.window,
                            scale * 1.44269504088896f};  // log2(e)
    const int seq = bad_seq(starts, kv_lens, table, n);
    if (seq < 0) a.run(find_runs(starts, kv_lens, table, n, LANES), threads);
    return seq;
}
