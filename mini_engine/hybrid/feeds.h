// Lesson 11. What N sequences feed in a step, and where their states are.

#pragma once
#include <cstdint>

extern "C" {
struct Feeds {  // [sequences] each
    int64_t sequences, longest;      // and the most tokens of one
    const int64_t *rows, *counts;    // a sequence's first row, and its tokens; nullptr: row i, and one
    const int64_t *sources, *slots;  // where the state before them is, and where the one behind goes
};
}

static inline int64_t row_of(const Feeds& f, int64_t i) { return f.rows ? f.rows[i] : i; }
static inline int64_t count_of(const Feeds& f, int64_t i) { return f.counts ? f.counts[i] : 1; }
