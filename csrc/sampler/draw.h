// What several targets draw at once: pick_uniform() of pick.h for kTogether of them, in the lanes of vector registers.
#pragma once
#include <cstdint>

namespace stretto {

constexpr int64_t kTogether = 8;    // targets
constexpr int64_t kMostDrawn = 32;  // picks of each

// Picks k <= kMostDrawn of [0, sizes[lane]) for each lane, from the stream of keys[lane]; pick e of a lane goes to
// picks[e * kTogether + lane]. A lane with at most k candidates gets nonsense. A set bit in the result: what this lane
// drew settles nothing (a number has to be drawn again), and pick_slowly() must be asked.
using Draw = uint32_t (*)(const uint64_t* keys, const uint64_t* sizes, int64_t k, uint64_t* picks);

// For the instruction set in use. nullptr: its registers are too short, and targets draw one by one.
Draw draw_together();

}  // namespace stretto
