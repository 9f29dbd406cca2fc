// The neighbour sampler: seeds in, relabelled subgraph out, for one or many node and edge types.
//
// A Sampler is shared by all threads and never changes; what a batch needs while it is made lives in a Scratch, one per
// thread, reused from batch to batch.
#pragma once
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "abi.h"
#include "sampler/buffer.h"
#include "sampler/draw.h"
#include "sampler/pick.h"
#include "sampler/table.h"

namespace stretto {

// The sampled part of one node type: global ids by position, and in disjoint sampling the tree of each.
struct SampledNodes {
    Buffer<int64_t> id;
    Buffer<int32_t> tree;
    std::vector<int64_t> per_hop;
    std::unique_ptr<DirectTable> direct;
    std::unique_ptr<HashTable> hashed;
};

template <class Table>
Table* table_of(const SampledNodes& nodes) {
    if constexpr (std::is_same_v<Table, DirectTable>)
        return nodes.direct.get();
    else
        return nodes.hashed.get();
}

// The sampled edges of one relation, grouped by target: targets [first, first + count.size()) of each hop follow each
// other.
struct SampledEdges {
    Buffer<int32_t> source;    // position of the source among the sampled nodes of its type
    Buffer<int64_t> position;  // place of the edge in the CSC arrays
    Buffer<int32_t> count;     // edges of each target
    std::vector<int64_t> per_hop;
    std::vector<int64_t> first_target, num_targets;  // per hop
};

struct Scratch {
    std::vector<SampledNodes> nodes;
    std::vector<SampledEdges> edges;
    Buffer<int64_t> tree_time;
    PickScratch pick;
    uint64_t batch_key = 0;
    uint64_t num_trees = 1;
};

class Sampler {
  public:
    explicit Sampler(const stretto_sampling_plan& plan);  // throws std::invalid_argument

    // Fills scratch with the batch of these seeds; throws std::invalid_argument for seeds outside the graph.
    void sample(const stretto_seeds& seeds, Scratch& scratch) const;

    std::unique_ptr<Scratch> borrow();
    void give_back(std::unique_ptr<Scratch> scratch);

    bool has(stretto_sampling flag) const { return (flags & flag) != 0; }

    std::vector<stretto_node_type> node_types;
    std::vector<stretto_relation> relations;
    std::vector<std::vector<int64_t>> fanouts;
    std::vector<stretto_slice> slices;
    int64_t num_hops;
    int64_t flags;
    const Draw draw = draw_together();

  private:
    void plant(const stretto_seeds& seeds, Scratch& scratch) const;
    template <class Row, class Table>
    void expand(Scratch& scratch, size_t r, int64_t hop, int64_t begin, int64_t end) const;
    template <class Row, class Table>
    void induce(Scratch& scratch, size_t relation) const;

    bool hashed_;
    bool temporal_;
    int owner_;  // process id: a forked child must not wait for a lock that its parent's threads held
    std::mutex mutex_;
    std::vector<std::unique_ptr<Scratch>> idle_;
};

}  // namespace stretto
