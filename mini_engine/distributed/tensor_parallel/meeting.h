// Lesson 18. A sum over processes in shared memory, in one meeting: each copies its part, raises its flag, waits for
// the flags of the others and adds up all parts.
//
//   flags    one for each rank, a cache line apart: how many meetings it has come to
//   parts    two halves, which meetings use in turn; in each, a place for every rank
//
// With two halves one meeting is enough. A rank that writes to a half for meeting n + 2 has seen all flags at n + 1,
// and a rank raises it only after reading the half of meeting n to its end.

#pragma once
#include <cstdint>

extern "C" {
struct Meeting {  // shared_memory.py has the same
    void* shared;
    int64_t rank, num_ranks, capacity;  // bytes of each place
    uint64_t count;                     // meetings so far
    int64_t calls, bytes;               // of collectives, which meet once for every piece; what this rank brought
    double seconds;                     // in them
    const volatile int32_t* lost;       // not 0: a rank is gone, wait no longer
    double patience;                    // seconds to wait for a rank that is alive
};

// Add up x over all ranks, in place; all have the same sum, bit for bit. Returns 0, or why a rank did not come.
typedef int AllReduce(Meeting* meeting, void* x, int64_t count);
AllReduce all_reduce_f32, all_reduce_bf16;

// Put all ranks' x one after the other into rank 0's out `[num_ranks, bytes]`; nothing in the others.
int gather(Meeting* meeting, const void* x, int64_t bytes, void* out);
}
constexpr int LOST = 1, IMPATIENT = 2;
