// Lesson 18. Collectives in shared memory: `meeting.h` has the idea.

#include "meeting.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "../../attention/vectors.h"

constexpr int LINE = 64, LOOKS = 200;  // at a flag before a look at the clock
constexpr std::chrono::microseconds AWAKE{1000}, NAP{50};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "flags are shared by processes");

static std::atomic<uint64_t>& flag_of(const Meeting& m, int64_t rank) {
    return *(std::atomic<uint64_t>*)((char*)m.shared + rank * LINE);
}
static char* place_of(const Meeting& m, int64_t rank) {  // in the half of the last meeting
    const int64_t half = m.count % 2 * m.num_ranks;
    return (char*)m.shared + m.num_ranks * LINE + (half + rank) * m.capacity;
}

// Look at the flag again and again, and between looks let others have the core: the rank that is waited for may need
// it. Ranks with a core each are never further apart than AWAKE, so after that it is better to sleep.
static int wait_for(const Meeting& m, int64_t rank) {
    using clock = std::chrono::steady_clock;
    const std::atomic<uint64_t>& flag = flag_of(m, rank);
    const auto begun = clock::now();
    while (true) {
        for (int look = 0; look < LOOKS; look++)
            if (flag.load(std::memory_order_acquire) >= m.count) return 0;
        const std::chrono::duration<double> waited = clock::now() - begun;
        if (*m.lost) return LOST;
        if (waited.count() > m.patience) return IMPATIENT;
        waited < AWAKE ? std::this_thread::yield() : std::this_thread::sleep_for(NAP);
    }
}

// Bring x, of so many bytes, and wait for all others. Afterwards the half of this meeting may be read until the next.
static int meet(Meeting& m, const void* x, int64_t bytes) {
    if (*m.lost) return LOST;
    m.count++;
    memcpy(place_of(m, m.rank), x, bytes);
    flag_of(m, m.rank).store(m.count, std::memory_order_release);
    for (int64_t rank = 0; rank < m.num_ranks; rank++)
        if (const int why = wait_for(m, rank)) return why;
    return 0;
}

template <typename T>
static void add_up(const Meeting& m, T* x, int64_t count) {
    constexpr int64_t PIECE = 1024;  // sums are float32 and in the order of the ranks, rounded once
    for (int64_t begin = 0; begin < count; begin += PIECE) {
        const int64_t size = std::min(PIECE, count - begin);
        float sums[PIECE];
        for (int64_t rank = 0; rank < m.num_ranks; rank++) {
            const T* part = (const T*)place_of(m, rank) + begin;
            for (int64_t i = 0; i < size; i++) sums[i] = rank ? sums[i] + widen(part[i]) : widen(part[i]);
        }
        for (int64_t i = 0; i < size; i++) narrow(sums[i], x + begin + i);
    }
}

// Call run(begin, size) for each piece of so many bytes until one fails; count all of them as one collective.
template <typename F>
static int in_pieces(Meeting& m, int64_t bytes, const F& run) {
    using clock = std::chrono::steady_clock;
    const auto begun = clock::now();
    int why = 0;
    for (int64_t begin = 0; begin < bytes && !why; begin += m.capacity)
        why = run(begin, std::min(m.capacity, bytes - begin));
    m.calls++, m.bytes += bytes, m.seconds += std::chrono::duration<double>(clock::now() - begun).count();
    return why;
}

template <typename T>
static int all_reduce(Meeting& m, T* x, int64_t count) {
    constexpr int64_t SIZE = sizeof(T);
    return in_pieces(m, count * SIZE, [&](int64_t begin, int64_t size) {
        const int why = meet(m, x + begin / SIZE, size);
        if (!why) add_up(m, x + begin / SIZE, size / SIZE);
        return why;
    });
}

int all_reduce_f32(Meeting* m, void* x, int64_t count) { return all_reduce(*m, (float*)x, count); }
int all_reduce_bf16(Meeting* m, void* x, int64_t count) { return all_reduce(*m, (bf16*)x, count); }

int gather(Meeting* m, const void* x, int64_t bytes, void* out) {
    return in_pieces(*m, bytes, [&](int64_t begin, int64_t size) {
        const int why = meet(*m, (const char*)x + begin, size);
        for (int64_t rank = 0; rank < m->num_ranks && m->rank == 0 && !why; rank++)
            memcpy((char*)out + rank * bytes + begin, place_of(*m, rank), size);
        return why;
    });
}
