// Lesson 16. Attention over latents for processors: one vector for each token, which is every head's key and value.
//
// attention.py's `attend_blocks` is the whole kernel in plain torch; read it first. This computes the same, faster.
//
// Lesson 3's kernel spends its time waiting for keys, each of which serves the few heads that share it. Here all heads
// read the same latents. A tile of them is copied once into the processor's cache, as floats, and that copy serves all
// heads twice (latent_tile.h):
//
//   tile[key] = latent, rotary key                   read         the only code that knows what a cache holds
//   scores[key][row] = q[row] . tile[key]            score_tile   a query is its latent part, then its rotary part
//   one online-softmax update for the whole tile     weigh
//   sums[row] += weights[key][row] * tile[key]       add_tile     of the latent part only
//
// Two matrix products with a softmax in between, so that is all it is. With 128 heads, each number of a latent that is
// fetched takes part in 256 multiplications: what limits this kernel is arithmetic, not memory.
//
// "Rows" are the heads of a sequence's queries. Which of them share a task changes no bit of their sums: a row's
// history alone decides the order, tiles of TILE keys, stretches of SPLIT keys, merged first to last as in tasks.h.

#pragma once
#include "latent_cpu.h"
#include "latent_tile.h"

struct Rows {  // of one sequence: some of its queries' heads, all heads of a query after those of the one before
    int seq, first, count;
    int64_t parts;  // where the sums of its stretches lie, if each is a task of its own; else -1
};

template <typename T, typename C>  // q and out hold T, the caches C
struct LatentAttention {
    const T *q, *q_rope;
    const C *c, *r;
    T* out;
    const int32_t *starts, *kv_lens, *table;
    LatentSizes n;
    float scale;

#if defined(__AVX512BF16__)
    static constexpr bool has_pairs = std::is_same_v<T, bf16> && std::is_same_v<C, bf16>;
#else
    static constexpr bool has_pairs = false;
#endif
    using Word = std::conditional_t<has_pairs, Pair, float>;
    static constexpr int PER_WORD = has_pairs ? 2 : 1;

    int words() const { return int(n.rank + n.rope + PER_WORD - 1) / PER_WORD; }  // of a query, of a key
    int width() const { return int(n.rank + PART - 1) / PART * PART; }    // of sums; past rank they mean nothing
    int line() const {  // words from one key to the next in a tile, in whole vectors
        return (std::max(words(), width() / PER_WORD) + LANES - 1) / LANES * LANES;
    }
    int record() const { return VALUES + width(); }
    int num_rows(int seq) const { return (starts[seq + 1] - starts[seq]) * int(n.heads); }
    int stretches(int seq) const { return (kv_lens[seq] + SPLIT - 1) / SPLIT; }
    int padded(const Rows& rows) const { return (rows.count + LANES - 1) / LANES * LANES; }
    int keys_seen(int seq, int row) const {
        return kv_lens[seq] - (starts[seq + 1] - starts[seq]) + row / int(n.heads) + 1;
    }

    struct Workspace {  // one thread's
        Floats q, tile, pairs, scores, factors, stretch, sums;
        std::vector<int32_t> seen;
        Workspace(const LatentAttention& a, int64_t rows)
            : q(rows * a.line()), tile((TILE + 1) * a.line()), pairs(TILE / 2 * a.width()), scores(TILE * rows),
              factors(rows), stretch(rows * a.record()), sums(rows * a.record()), seen(rows) {}
    };

    // ------------------------------------------------------------ some rows over a stretch of history

    void take_queries(const Rows& rows, Workspace& w) const {  // a vector of rows: its words one after the other
        for (int i = 0; i < padded(rows); i += LANES) {
            float *lines = w.tile.at(0), *to = w.q.at(int64_t(i) * line());
            for (int j = 0; j < LANES; j++) {
                const int row = rows.first + i + j, head = row % int(n.heads);
                const int64_t query = starts[rows.seq] + row / int(n.heads);
                w.seen[i + j] = i + j < rows.count ? keys_seen(rows.seq, row) : 0;
                if (i + j < rows.count)
                    join(q + query * n.q_stride + head * n.q_head_stride,
                         q_rope + query * n.rope_stride + head * n.rope_head_stride, (Word*)lines + j * line());
                else
                    std::fill_n(lines + j * line(), line(), 0.f);
            }
            for (int d = 0; d < words(); d += LANES) {
                vec part[LANES];
                for (int j = 0; j < LANES; j++) part[j] = load(lines + j * line() + d);
                transpose(part);
                for (int j = 0; j < LANES; j++) store(to + (d + j) * LANES, part[j]);
            }
        }
    }

    template <typename E>
    void join(const E* latent, const E* rotary, Word* to) const {  // the words of one vector, of two parts
        if constexpr (has_pairs) {
            bf16* numbers = std::copy(rotary, rotary + n.rope, std::copy(latent, latent + n.rank, (bf16*)to));
            if ((n.rank + n.rope) % 2) *numbers = {};
        } else {
            Row<E>::read(latent, int(n.rank), to);
            Row<E>::read(rotary, int(n.rope), to + n.rank);
        }
    }

    void read_tile(int seq, int first, int last, Word* to) const {
        for (int key = first; key < last; key++, to += line()) {
            const int64_t block = table[seq * n.max_blocks + key / n.block_size];
            const int64_t slot = block * n.block_size + key % n.block_size;
            join(c + slot * Row<C>::size(n.rank), r + slot * Row<C>::size(n.rope), to);
        }
    }

    void pair_keys(const Word* tile, int count, float* to) const {  // each number of two latents side by side
        for (int key = 0; key < count; key += 2)
            for (int d = 0; d < width(); d += LANES, to += LANES) {
                halves a, b = {};
                memcpy(&a, (const bf16*)(tile + key * line()) + d, sizeof a);
                if (key + 1 < count) memcpy(&b, (const bf16*)(tile + (key + 1) * line()) + d, sizeof b);
                store(to, (vec)(__builtin_convertvector(a, uvec) | __builtin_convertvector(b, uvec) << 16));
            }
    }

    void attend(const Rows& rows, int begin, int end, float* sums, Workspace& w) const {
        const int count = padded(rows);
        take_queries(rows, w);
        clear(sums, count, record());
        for (int first = begin, last; first < end; first = last) {
            last = std::min(end, first / SPLIT * SPLIT + SPLIT);
            float* stretch = end - begin <= SPLIT ? sums : w.stretch.at(0);  // a single one needs no merging
            if (stretch != sums) clear(stretch, count, record());
            for (int key = first; key < last; key += TILE) {
                const int keys = std::min(TILE, last - key);
                float *scores = w.scores.at(0), *factors = w.factors.at(0);
                Word* tile = (Word*)w.tile.at(0);
                read_tile(rows.seq, key, key + keys, tile);
                score_tile(w.q.at(0), tile, line(), words(), keys, scores, count);
                weigh(scores, scale, count, key, keys, w.seen.data(), factors, stretch, record());
                if constexpr (has_pairs) {
                    pair_keys(tile, keys, w.pairs.at(0)), pair_weights(scores, count, keys);
                    const Pair* pairs = (const Pair*)w.pairs.at(0);
                    add_tile(scores, count, (keys + 1) / 2, pairs, width(), width(), factors, stretch, record());
                } else
                    add_tile(scores, count, keys, tile, line(), width(), factors, stretch, record());
            }
            if (stretch != sums) merge(sums, stretch, count, record());
        }
    }

    void finish(const Rows& rows, const float* sums) const {
        T* to = out + (starts[rows.seq] * n.heads + rows.first) * n.rank;
        for (int i = 0; i < rows.count; i++, sums += record(), to += n.rank) {
            int d = 0;
            for (; d + LANES <= n.rank; d += LANES) store(to + d, load(sums + VALUES + d) / sums[WEIGHTS]);
            for (; d < n.rank; d++) narrow(sums[VALUES + d] / sums[WEIGHTS], to + d);
        }
    }

    // ------------------------------------------------------------ the whole batch

    // Cut histories first, as then each latent is still read once; rows only where that makes too few tasks.
    void cut(int threads, std::vector<Rows>& parts, std::vector<Task>& tasks, int64_t& floats) const {
        int per = MAX_ROWS;
        auto count = [&](bool each_stretch) {
            int64_t all = 0;
            for (int s = 0; s < n.num_seqs; s++)
                all += int64_t(num_rows(s) + per - 1) / per * (each_stretch ? stretches(s) : 1);
            return all;
        };
        while (threads > 1 && per > 2 * LANES && count(true) < 2 * threads) per /= 2;
        const bool split = threads > 1 && count(false) < 4 * threads;
        for (int s = 0; s < n.num_seqs; s++)
            for (int first = 0; first < num_rows(s); first += per) {
                Rows rows{s, first, std::min(per, num_rows(s) - first), -1};
                const int end = keys_seen(s, first + rows.count - 1);
                const bool several = split && end > SPLIT;
                if (several) rows.parts = floats;
                for (int begin = 0, last; begin < end; begin = last) {
                    last = several ? std::min(end, begin + SPLIT) : end;
                    tasks.push_back({int(parts.size()), begin, last});
                    floats += several ? int64_t(padded(rows)) * record() : 0;
                }
                parts.push_back(rows);
            }
    }

    void run(int threads) const {
        std::vector<Rows> parts;
        std::vector<Task> tasks;
        int64_t floats = 0;
        cut(threads, parts, tasks, floats);
        Floats kept(floats);
        int most = LANES;
        for (const Rows& rows : parts) most = std::max(most, padded(rows));
        const int num_tasks = int(tasks.size()), num_parts = int(parts.size());
#pragma omp parallel num_threads(threads) if (num_tasks > 1)
        {
            Workspace w(*this, most);
#pragma omp for schedule(dynamic)
            for (int i = 0; i < num_tasks; i++) {
                const Rows& rows = parts[tasks[i].tile];
                const int64_t size = int64_t(padded(rows)) * record();
                float* sums = rows.parts < 0 ? w.sums.at(0) : kept.at(rows.parts + tasks[i].begin / SPLIT * size);
                attend(rows, tasks[i].begin, tasks[i].end, sums, w);
                if (rows.parts < 0) finish(rows, sums);
            }
#pragma omp for
            for (int i = 0; i < num_parts; i++) {
                const Rows& rows = parts[i];
                if (rows.parts < 0) continue;
                float* sums = kept.at(rows.parts);
                const int64_t size = int64_t(padded(rows)) * record();
                const int more = (keys_seen(rows.seq, rows.first + rows.count - 1) - 1) / SPLIT;
                for (int s = 1; s <= more; s++) merge(sums, sums + s * size, padded(rows), record());
                finish(rows, sums);
            }
        }
        std::fill(out + starts[n.num_seqs] * n.heads * n.rank, out + n.num_rows * n.heads * n.rank, T{});
    }
};

template <typename T, typename C>
static int run(const void* q, const void* q_rope, const void* c, const void* r, void* out, const int32_t* starts,
               const int32_t* kv_lens, const int32_t* table, const LatentSizes& n, float scale, int threads) {
    const LatentAttention<T, C> a{(const T*)q, (const T*)q_rope, (const C*)c, (const C*)r, (T*)out, starts, kv_lens,
                                  table, n, scale * 1.44269504088896f};  // log2(e)
    const AttentionSizes tables{n.num_seqs, n.num_rows, n.heads, 1, n.rank, n.num_blocks, n.block_size, n.max_blocks,
                                0, 0, INT32_MAX};
    const int seq = bad_seq(starts, kv_lens, table, tables);
    if (seq < 0) a.run(threads);
    return seq;
}
