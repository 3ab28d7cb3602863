// Lesson 11. Some tokens of each of N sequences through a short convolution between two gates, with the last inputs of
// each sequence kept, in place or from one slot to another.
//
// Each thread has some channels of all sequences, so none waits for another. Values are rounded where torch rounds
// them, so the results are the same bits.

#pragma once
#include "../layers/fused.h"
#include "feeds.h"

extern "C" {
struct ConvSizes {
    int64_t channels, taps;
    const float *weight, *bias;  // [taps, channels], the latest input last; [channels], or nullptr
};
}

constexpr int64_t BAND = 64;  // channels at a time: whole cache lines

template <typename T>
struct ConvStep {
    const ConvSizes& s;
    Rows<T> rows;  // [3 * channels] each: the gate before the convolution, the one behind it, and x
    T* state;      // [slots, channels, taps - 1], the latest input last
    Rows<T> out;   // [channels] each

    static vec stored(vec x) {  // as a T
        T kept[LANES];
        store_some(kept, x, LANES);
        return load_some(kept, LANES);
    }

    // Input number i of a sequence, those before this step included, is in row i % taps of `window`, [taps, BAND].
    void advance(int64_t row, int64_t count, int64_t source, int64_t slot, int64_t begin, float* window) const {
        const int64_t n = std::min(BAND, s.channels - begin), kept = s.taps - 1;
        const auto input = [&](int64_t i) { return window + i % s.taps * BAND; };
        const T* before = state + (source * s.channels + begin) * kept;
        for (int64_t i = 0; i < kept; i++)
            for (int64_t c = 0; c < n; c++) input(i)[c] = widen(before[c * kept + i]);
        for (int64_t t = 0; t < count; t++)
            for (int64_t c = 0; c < n; c += LANES)
                convolve(row + t, begin + c, n - c, [&](int64_t i) { return input(t + i) + c; });
        T* behind = state + (slot * s.channels + begin) * kept;
        for (int64_t i = 0; i < kept; i++)
            for (int64_t c = 0; c < n; c++) narrow(input(count + i)[c], behind + c * kept + i);
    }

    template <typename F>
    void convolve(int64_t row, int64_t c, int64_t left, const F& input) const {  // up to LANES channels of a token
        const T* gates = rows.at(row) + c;
        store_some(input(s.taps - 1), stored(load_some(gates, left) * load_some(gates + 2 * s.channels, left)), left);
        const auto product = [&](int64_t i) {
            const volatile vec alone = load_some(input(i), left) * load_some(s.weight + i * s.channels + c, left);
            return vec(alone);  // volatile: rounded before it is added, not in one operation with the sum
        };
        vec sum = product(0);
        for (int64_t i = 1; i < s.taps; i++) sum += product(i);
        sum = stored(sum);
        if (s.bias) sum = stored(sum + load_some(s.bias + c, left));
        store_some(out.at(row) + c, load_some(gates + s.channels, left) * sum, left);
    }

    // Called by all threads of a team; a later feed may go on with the states that one before has left.
    void run(const Feeds* feeds, int64_t count) const {
        std::vector<float> window(s.taps * BAND);
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < s.channels; begin += BAND)
            for (const Feeds* f = feeds; f < feeds + count; f++)
                for (int64_t i = 0; i < f->sequences; i++)
                    advance(row_of(*f, i), count_of(*f, i), f->sources[i], f->slots[i], begin, window.data());
    }
};
