// Lesson 16. A layer's mixer up to its last matrix in one call, for a step whose sequences are all absorbed.
//
//   project    norm of x, and one matrix: queries or their latent, the token's latent, its rotary key
//   queries    norm of the queries' latent, and the matrix behind it, if queries have a latent
//   keep       norm of latents, rotation of rotary keys and of the queries' ends; the first two into their slots
//   attend     queries absorb W_UK, attention over latents, W_UV applied to its sums
//
// How latents are stored is the pool's business: it brings one function that writes a slot and one that attends.

#include "absorb.h"
#include "latent_cpu.h"

#include "../attention/paged_cpu.h"
#include "../layers/blocks.h"

extern "C" {
struct LatentLayer {  // mixer.py has the same structs
    const Entry *project, *queries;  // of `queries`: nullptr if queries have no latent
    Norm latent_norm;
    const void* kv_b;  // [heads, nope + v, rank]
    int64_t heads, rank, nope, rope, v, interleaved;
    float scale;
};
struct LatentStep {
    int64_t rows;
    Place x, normed, joined, q_normed, q;  // [rows, ...]: hidden, hidden, what `project` makes, q's latent, queries
    void *rotary, *absorbed, *sums, *out;  // [rows, heads + 1, rope], [rows, heads, rank] twice, [rows, heads, v]
    const void *cos, *sin;                 // [rows, rope]
    void *c_cache, *r_cache;
    const int64_t* slots;  // [rows]
    const int32_t *starts, *kv_lens, *table;
    int64_t num_seqs, num_blocks, block_size, max_blocks;
    WriteSlot* write;
    LatentPagedAttention* attention;
    MultiplyHeads *to_latents, *from_latents;
};
}

template <typename T>
struct LatentMixer {
    const LatentLayer& l;
    const LatentStep& s;

    int64_t qk() const { return l.nope + l.rope; }
    Place queries() const { return l.queries ? s.q : s.joined; }
    T* latent(int64_t row) const {
        const int64_t before = l.project->matrix.outputs - l.rank - l.rope;
        return (T*)s.joined.data + row * s.joined.stride + before;
    }
    T* rotary(int64_t row, int64_t head) const { return (T*)s.rotary + (row * (l.heads + 1) + head) * l.rope; }

    void enter(const Entry& layer, Place x, Place normed, Place out) const {
        Entry entry = layer;
        entry.at = {s.rows, x, normed, out};
        Block<T>::enter(entry);
        barrier();
    }

    // Neighbours are a pair if interleaved: they are moved apart, as rotate_end in model.py does.
    void turn(const T* from, int64_t row, T* to) const {
        const T *cos = (const T*)s.cos + row * l.rope, *sin = (const T*)s.sin + row * l.rope;
        const int64_t half = l.rope / 2, next = l.interleaved ? 2 : 1, other = l.interleaved ? 1 : half;
        for (int64_t i = 0, j = half; i < half; i += LANES, j += LANES) {
            const int64_t left = half - i;
            vec a = {}, b = {};
            for (int64_t k = 0; k < std::min<int64_t>(LANES, left); k++)
                a[k] = widen(from[(i + k) * next]), b[k] = widen(from[(i + k) * next + other]);
            store_some(to + i, a * load_some(cos + i, left) - b * load_some(sin + i, left), left);
            store_some(to + j, b * load_some(cos + j, left) + a * load_some(sin + j, left), left);
        }
    }

    void keep() const {
        rms_norm(Rows<T>{latent(0), s.rows, l.rank, s.joined.stride}, l.latent_norm.weight, l.latent_norm.eps,
                 Rows<T>{latent(0), s.rows, l.rank, s.joined.stride});
        const Place q = queries();
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < s.rows; row++) {  // by the thread that normed its latent
            const T* its = (const T*)q.data + row * q.stride + l.nope;
            for (int64_t head = 0; head < l.heads; head++) turn(its + head * qk(), row, rotary(row, head));
            turn(latent(row) + l.rank, row, rotary(row, l.heads));
            s.write(latent(row), 1, l.rank, s.c_cache, s.slots[row]);
            s.write(rotary(row, l.heads), 1, l.rope, s.r_cache, s.slots[row]);
        }
    }

    void attend(int threads) const {
        const Place q = queries();
        const int64_t w_head = (l.nope + l.v) * l.rank;
        const HeadsProduct before{q.data, l.kv_b, s.absorbed, s.rows, l.heads, l.nope, l.rank, q.stride, qk(), w_head};
        const HeadsProduct after{s.sums, (const T*)l.kv_b + l.nope * l.rank, s.out, s.rows, l.heads, l.rank, l.v,
                                 l.heads * l.rank, l.rank, w_head};
        const LatentSizes sizes{s.num_seqs, s.rows, l.heads, l.rank, l.rope, s.num_blocks, s.block_size, s.max_blocks,
                                l.heads * l.rank, l.rank, (l.heads + 1) * l.rope, l.rope};
        s.to_latents(&before, threads);
        s.attention(s.absorbed, s.rotary, s.c_cache, s.r_cache, s.sums, s.starts, s.kv_lens, s.table, &sizes, l.scale,
                    threads);
        s.from_latents(&after, threads);
    }

    int run(int threads) const {
        const AttentionSizes tables{s.num_seqs,   s.rows,       l.heads,      1, l.rank, s.num_blocks,
                                    s.block_size, s.max_blocks, 0,            0, EVERY_KEY};
        if (const int seq = bad_seq(s.starts, s.kv_lens, s.table, tables); seq >= 0) return seq;
#pragma omp parallel num_threads(threads)
        {
            enter(*l.project, s.x, s.normed, s.joined);
            if (l.queries) enter(*l.queries, s.joined, s.q_normed, s.q);
            keep();
        }
        attend(threads);
        return -1;
    }
};

// Returns -1, or the sequence whose block table names a block that does not exist; then nothing was written.
#define FUNCTION(T, NAME)                                                                            \
    extern "C" int latent_mixer_##NAME(const LatentLayer* layer, const LatentStep* step, int threads) { \
        return LatentMixer<T>{*layer, *step}.run(threads);                                                  \
    }
FUNCTION(float, f32)
FUNCTION(bf16, bf16)
