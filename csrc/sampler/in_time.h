// Edges of a target are sorted by time, so those not after some time are a prefix: where does it end?
#pragma once
#include <cstdint>

namespace stretto {

// Of edges [low, high).
inline int64_t end_in_time(const int64_t* edge_time, int64_t low, int64_t high, int64_t time) {
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (edge_time[middle] <= time)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// The same for at most kBlock targets, in step with each other, so that their cache misses overlap: high becomes the
// end.
template <int64_t kBlock>
void ends_in_time(const int64_t* edge_time, int64_t size, const int64_t* low, const int64_t* time, int64_t* high) {
    int64_t at[kBlock], length[kBlock], open = 0;
    for (int64_t i = 0; i < size; ++i) {
        at[i] = low[i];
        length[i] = high[i] - low[i];
        open |= length[i];
        __builtin_prefetch(edge_time + at[i] + length[i] / 2);
    }
    while (open) {
        open = 0;
        for (int64_t i = 0; i < size; ++i) {
            if (length[i] == 0) continue;
            const int64_t half = length[i] / 2;
            const bool after = edge_time[at[i] + half] > time[i];
            at[i] = after ? at[i] : at[i] + half + 1;
            length[i] = after ? half : length[i] - half - 1;
            open |= length[i];
            __builtin_prefetch(edge_time + at[i] + length[i] / 2);
        }
    }
    for (int64_t i = 0; i < size; ++i) high[i] = at[i];
}

}  // namespace stretto
