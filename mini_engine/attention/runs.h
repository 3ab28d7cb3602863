// Lesson 3. Runs: sequences that decode and whose block tables begin with the same blocks, as after lesson 8's sharing.
//
// Their queries meet the same keys there, so that these are read once for all of them (cascade attention: Ye et al.,
// FlashInfer, 2024; Juravsky et al., Hydragen, 2024). A row's sums keep their order: sharing changes no bit.

#pragma once
#include "paged_cpu.h"

#include <algorithm>
#include <vector>

constexpr int LEAST_SHARED = 64;  // keys; below, a run saves less than it costs

struct Run {
    std::vector<int> seqs;
    int keys;  // at the beginning of each, in the same blocks; whole vectors of them
};

// The blocks that two tables have in common, of at most `most`.
static int common_blocks(const int32_t* a, const int32_t* b, int most) {
    return int(std::mismatch(a, a + most, b).first - a);
}

// A run goes on as long as at least half of what it shares stays shared.
static std::vector<Run> find_runs(const int32_t* starts, const int32_t* kv_lens, const int32_t* table,
                                  const AttentionSizes& n, int lanes) {
    std::vector<int> order;
    for (int s = 0; s < n.num_seqs; s++)
        if (starts[s + 1] - starts[s] == 1 && kv_lens[s] > LEAST_SHARED && kv_lens[s] <= n.window) order.push_back(s);
    const auto row = [&](int s) { return table + s * n.max_blocks; };
    const auto whole = [&](int s) { return int((kv_lens[s] - 1) / n.block_size); };  // blocks before its last key
    std::sort(order.begin(), order.end(), [&](int a, int b) {
        const int both = std::min(whole(a), whole(b)), same = common_blocks(row(a), row(b), both);
        if (same < both) return row(a)[same] < row(b)[same];
        return whole(a) != whole(b) ? whole(a) < whole(b) : a < b;
    });
    std::vector<Run> runs;
    for (size_t i = 0, end; i < order.size(); i = end) {
        int blocks = whole(order[i]);
        for (end = i + 1; end < order.size(); end++) {
            const int both = std::min(blocks, whole(order[end]));
            const int same = common_blocks(row(order[i]), row(order[end]), both);
            if (same * n.block_size < LEAST_SHARED || (end > i + 1 && 2 * same < blocks)) break;
            blocks = same;
        }
        const int keys = int(blocks * n.block_size / lanes * lanes);
        if (end > i + 1 && keys >= LEAST_SHARED) runs.push_back({{order.begin() + i, order.begin() + end}, keys});
    }
    return runs;
}
