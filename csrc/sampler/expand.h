// One hop of one relation: neighbours of some targets are picked, and those that are new to the batch get a position.
//
// Targets go through it in blocks of kBlock, by steps that each hide one cache miss: open() reads a target's bounds,
// pick() chooses among its edges, fetch() reads the ids at their other ends, enter() looks these up in the table. A
// step asks for what the next one reads, and is a block ahead of it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "sampler/draw.h"
#include "sampler/in_time.h"
#include "sampler/sampler.h"

namespace stretto {

template <class Row, class Table>
class Expansion {
  public:
    Expansion(const Sampler& sampler, Scratch& scratch, size_t r, int64_t hop)
        : sampler_(sampler),
          scratch_(scratch),
          relation_(sampler.relations[r]),
          row_(static_cast<const Row*>(relation_.row)),
          fanout_(sampler.fanouts[r][static_cast<size_t>(hop)]),
          replace_(sampler.has(STRETTO_REPLACE)),
          disjoint_(sampler.has(STRETTO_DISJOINT)),
          targets_(scratch.nodes[static_cast<size_t>(relation_.target)]),
          sources_(scratch.nodes[static_cast<size_t>(relation_.source)]),
          edges_(scratch.edges[r]),
          table_(*table_of<Table>(sources_)),
          key_(combine(combine(scratch.batch_key, static_cast<uint64_t>(hop)), r)) {
        const bool plain = !replace_ && !sampler.has(STRETTO_LABOR) && !sampler.has(STRETTO_LAST);
        if (plain && relation_.running == nullptr && 0 < fanout_ && fanout_ <= kMostDrawn) draw_ = sampler.draw;
    }

    // Samples the neighbours of targets [begin, end) and appends what is new to the sources.
    void run(int64_t begin, int64_t end) {
        first_count_ = edges_.count.size();
        edges_.count.reserve(end - begin);
        edges_.first_target.push_back(begin);
        edges_.num_targets.push_back(end - begin);
        const int64_t before = edges_.source.size();
        Block picked{begin, 0, before, before}, fetched = picked;
        prefetch_bounds(begin, std::min(begin + kAhead, end));
        for (int64_t first = begin; first < end; first += kBlock) {
            prefetch_bounds(std::min(first + kAhead, end), std::min(first + kAhead + kBlock, end));
            Block block{first, std::min(kBlock, end - first), picked.stop, picked.stop};
            open(block, picked.stop - fetched.start);
            pick(block);
            enter(fetched);
            fetch(picked);
            fetched = picked;
            picked = block;
        }
        enter(fetched);
        fetch(picked);
        enter(picked);
        edges_.position.set_size(picked.stop);
        edges_.source.set_size(picked.stop);
        edges_.per_hop.push_back(picked.stop - before);
    }

  private:
    static constexpr int64_t kBlock = kTogether;
    static constexpr int64_t kAhead = 2 * kBlock;  // targets whose bounds are asked for before they are read
    // Fan-outs up to this are written in loops of one length, which are guessed right: a target with few neighbours
    // writes as many entries as one with many, and takes what it has.
    static constexpr int64_t kSteps = 16;

    struct Block {
        int64_t first, size;  // targets
        int64_t start, stop;  // their edges
    };

    void prefetch_bounds(int64_t i, int64_t end) const {
        for (; i < end; ++i) __builtin_prefetch(relation_.colptr + targets_.id[i]);
    }

    // Bounds and draws of the block's targets, and room for their edges besides the `under_way` that are not entered.
    void open(const Block& block, int64_t under_way) {
        int64_t times[kBlock];
        for (int64_t i = 0; i < block.size; ++i) {
            const int64_t v = targets_.id[block.first + i];
            low_[i] = relation_.colptr[v];
            high_[i] = relation_.colptr[v + 1];
            keys_[i] = combine(key_, static_cast<uint64_t>(v));
            if (disjoint_) keys_[i] = combine(keys_[i], static_cast<uint64_t>(targets_.tree[block.first + i]));
            if (relation_.time) times[i] = scratch_.tree_time[targets_.tree[block.first + i]];
        }
        if (relation_.time) ends_in_time<kBlock>(relation_.time, block.size, low_, times, high_);
        int64_t bound = under_way;
        for (int64_t i = 0; i < block.size; ++i) {
            const int64_t degree = high_[i] - low_[i];
            size_[i] = static_cast<uint64_t>(degree);
            bound += fanout_ < 0 || (degree < fanout_ && !replace_) ? degree : fanout_;
        }
        make_room(block.start, bound);
        if (draw_ != nullptr) unsettled_ = draw_(keys_, size_, fanout_, picks_);
    }

    void make_room(int64_t picked, int64_t bound) {
        if (sources_.id.size() + bound > INT32_MAX) throw std::length_error("a batch holds more than 2^31 nodes");
        edges_.position.set_size(picked);
        edges_.source.set_size(picked);
        edges_.position.reserve(bound + kSteps);
        edges_.source.reserve(bound);
        sources_.id.reserve(bound + 1);  // one more is written than is kept
        if (disjoint_) sources_.tree.reserve(bound + 1);
        table_.reserve(bound);
        position_ = edges_.position.data();
        source_ = edges_.source.data();
    }

    // Which edges each target of the block takes.
    void pick(Block& block) {
        const int64_t steps = fanout_ <= kSteps ? std::max(fanout_, int64_t{0}) : 0;
        int32_t* count = edges_.count.data() + edges_.count.size();
        int64_t* out = position_ + block.start;
        for (int64_t i = 0; i < block.size; ++i) {
            const int64_t low = low_[i], n = high_[i] - low;
            int64_t taken = n;
            if (n == 0 || fanout_ < 0 || (n <= fanout_ && !replace_ && relation_.running == nullptr)) {
                pick_all(low, std::max(n, steps), out);
                __builtin_prefetch(row_ + low);
                __builtin_prefetch(row_ + std::max(low + n - 1, int64_t{0}));  // no neighbours: none before the first
            } else if (draw_ != nullptr && !(unsettled_ >> i & 1)) {
                taken = fanout_;
                for (int64_t e = 0; e < taken; ++e) {
                    out[e] = low + static_cast<int64_t>(picks_[e * kTogether + i]);
                    __builtin_prefetch(row_ + out[e]);
                }
            } else {
                taken = pick_some(low, n, keys_[i], out);
                for (int64_t e = 0; e < taken; ++e) __builtin_prefetch(row_ + out[e]);
            }
            out += taken;
            count[i] = static_cast<int32_t>(taken);
        }
        edges_.count.set_size(edges_.count.size() + block.size);
        block.stop = out - position_;
    }

    // The edges that one target with n > 0 neighbours takes, not all of them; how many.
    int64_t pick_some(int64_t low, int64_t n, uint64_t key, int64_t* out) const {
        if (fanout_ == 0) return 0;
        Stream stream(key);
        auto& scratch = scratch_.pick;
        if (relation_.running != nullptr)
            return pick_weighted(stream, relation_.running + low, low, n, fanout_, replace_, scratch, out);
        if (sampler_.has(STRETTO_LAST)) {
            const int64_t last = std::min(fanout_, n), from = low + n - last;
            return replace_ ? pick_replace(stream, from, last, fanout_, out) : pick_all(from, last, out);
        }
        if (replace_) return pick_replace(stream, low, n, fanout_, out);
        if (sampler_.has(STRETTO_LABOR)) {
            const uint64_t shared = sampler_.has(STRETTO_SHARED) ? scratch_.batch_key : key_;
            return pick_labor(combine(shared, UINT64_MAX - 1), row_, low, n, fanout_, scratch, out);
        }
        return pick_uniform(stream, low, n, fanout_, scratch, out);
    }

    // Calls each(edge, tree) for the edges of the block in order; the tree is 0 where there are none.
    template <class Each>
    void for_edges(const Block& block, Each&& each) const {
        if (!disjoint_) {
            for (int64_t e = block.start; e < block.stop; ++e) each(e, 0);
            return;
        }
        const int32_t* count = edges_.count.data() + first_count_ + block.first - edges_.first_target.back();
        int64_t e = block.start;
        for (int64_t i = 0; i < block.size; ++i)
            for (const int64_t stop = e + count[i]; e < stop; ++e) each(e, targets_.tree[block.first + i]);
    }

    // The key of a source in the table: its id, or its id in a tree.
    uint64_t key_of(int64_t id, int32_t tree) const {
        return disjoint_ ? static_cast<uint64_t>(id) * scratch_.num_trees + static_cast<uint64_t>(tree)
                         : static_cast<uint64_t>(id);
    }

    // Reads the ids at the other ends of the block's edges. Where they fit they wait in `source` until they are
    // entered.
    void fetch(const Block& block) {
        const auto table = table_.entries();
        for_edges(block, [&, row = row_, position = position_, source = source_](int64_t e, int32_t tree) {
            const Row v = row[position[e]];
            table.prefetch(key_of(v, tree));
            if constexpr (sizeof(Row) == sizeof(int32_t)) source[e] = v;
        });
    }

    // Gives the sources of the block's edges their positions.
    void enter(const Block& block) {
        auto table = table_.entries();
        int64_t num_sources = sources_.id.size();
        int64_t* ids = sources_.id.data();
        int32_t* trees = sources_.tree.data();
        for_edges(block, [&, row = row_, position = position_, source = source_](int64_t e, int32_t tree) {
            int64_t v = source[e];
            if constexpr (sizeof(Row) != sizeof(int32_t)) v = row[position[e]];
            const Place place = table.insert(key_of(v, tree), static_cast<uint32_t>(num_sources));
            ids[num_sources] = v;  // written always, kept only if new
            if (disjoint_) trees[num_sources] = tree;
            num_sources += place.is_new;
            source[e] = static_cast<int32_t>(place.position);
        });
        sources_.id.set_size(num_sources);
        if (disjoint_) sources_.tree.set_size(num_sources);
    }

    const Sampler& sampler_;
    Scratch& scratch_;
    const stretto_relation& relation_;
    const Row* const row_;
    const int64_t fanout_;
    const bool replace_, disjoint_;
    SampledNodes& targets_;
    SampledNodes& sources_;  // may be the same
    SampledEdges& edges_;
    Table& table_;
    const uint64_t key_;
    Draw draw_ = nullptr;
    int64_t first_count_ = 0;  // of this hop's targets in edges_.count
    // Of the block that was opened last.
    int64_t low_[kBlock] = {}, high_[kBlock] = {};
    uint64_t size_[kBlock] = {}, keys_[kBlock] = {};
    uint64_t picks_[kBlock * kMostDrawn];
    uint32_t unsettled_ = 0;
    // edges_.position and edges_.source, until there is room to be made.
    int64_t* position_ = nullptr;
    int32_t* source_ = nullptr;
};

}  // namespace stretto
