#include "sampler/sampler.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "sampler/expand.h"

namespace stretto {
namespace {

constexpr int64_t kMostReplaced = int64_t{1} << 24;  // draws of one node, however few neighbours it has
// Above this many nodes a table entry per node no longer stays in cache, and a hash table of the batch's size wins.
constexpr int64_t kMostDirect = int64_t{1} << 24;

std::string number(int64_t value) { return std::to_string(value); }

template <class Row>
void check_rows(const stretto_relation& relation, size_t r, int64_t num_sources, int64_t num_edges) {
    const auto* row = static_cast<const Row*>(relation.row);
    for (int64_t e = 0; e < num_edges; ++e) {
        if (row[e] < 0 || row[e] >= num_sources)
            throw std::invalid_argument("edge " + number(e) + " of relation " + number(static_cast<int64_t>(r)) +
                                        " comes from node " + number(row[e]) + ", but its type has " +
                                        number(num_sources) + " nodes");
    }
}

}  // namespace

Sampler::Sampler(const stretto_sampling_plan& plan)
    : node_types(plan.node_types, plan.node_types + plan.num_node_types),
      relations(plan.relations, plan.relations + plan.num_relations),
      slices(plan.slices, plan.slices + plan.num_slices),
      num_hops(plan.num_hops),
      flags(plan.flags),
      hashed_(has(STRETTO_DISJOINT)),
      temporal_(false),
      owner_(getpid()) {
    for (const auto& type : node_types) {
        hashed_ |= type.num_nodes > kMostDirect;
        temporal_ |= type.time != nullptr;
    }
    for (size_t r = 0; r < relations.size(); ++r) {
        auto& relation = relations[r];
        temporal_ |= relation.time != nullptr;
        fanouts.emplace_back(relation.fanout, relation.fanout + num_hops);
        for (auto& fanout : fanouts.back()) {  // sums over targets must not overflow
            if (fanout > kMostReplaced && has(STRETTO_REPLACE))
                throw std::invalid_argument("a fan-out of " + number(fanout) + " draws with replacement is too large");
            fanout = std::min<int64_t>(fanout, INT32_MAX);
        }
        const int64_t num_targets = node_types[relation.target].num_nodes;
        if (relation.colptr[0] != 0) throw std::invalid_argument("colptr does not start at 0");
        for (int64_t v = 0; v < num_targets; ++v)
            if (relation.colptr[v] > relation.colptr[v + 1])
                throw std::invalid_argument("colptr decreases at node " + number(v));
        const int64_t num_edges = relation.colptr[num_targets], num_sources = node_types[relation.source].num_nodes;
        if (relation.row_bytes == 4)
            check_rows<int32_t>(relation, r, num_sources, num_edges);
        else
            check_rows<int64_t>(relation, r, num_sources, num_edges);
        relation.fanout = nullptr;  // kept in fanouts
    }
    if (temporal_ && !has(STRETTO_DISJOINT)) throw std::invalid_argument("temporal sampling has to be disjoint");
}

std::unique_ptr<Scratch> Sampler::borrow() {
    if (getpid() == owner_) {
        std::lock_guard lock(mutex_);
        if (!idle_.empty()) {
            auto scratch = std::move(idle_.back());
            idle_.pop_back();
            return scratch;
        }
    }
    auto scratch = std::make_unique<Scratch>();
    scratch->nodes.resize(node_types.size());
    scratch->edges.resize(relations.size());
    for (size_t t = 0; t < node_types.size(); ++t) {
        if (hashed_)
            scratch->nodes[t].hashed = std::make_unique<HashTable>();
        else
            scratch->nodes[t].direct = std::make_unique<DirectTable>(node_types[t].num_nodes);
    }
    return scratch;
}

void Sampler::give_back(std::unique_ptr<Scratch> scratch) {
    if (getpid() != owner_) return;
    std::lock_guard lock(mutex_);
    idle_.push_back(std::move(scratch));
}

// The seeds take the first positions, duplicates included: position i of the batch is seed i, whatever it is. The table
// knows the first of several equal seeds. In disjoint sampling seed i is the root of tree i.
void Sampler::plant(const stretto_seeds& seeds, Scratch& scratch) const {
    const bool disjoint = has(STRETTO_DISJOINT);
    scratch.batch_key = combine(combine(combine(kGolden, seeds.seed), seeds.epoch), seeds.batch);
    scratch.tree_time.clear();
    scratch.num_trees = 0;
    for (size_t t = 0; t < node_types.size(); ++t) scratch.num_trees += static_cast<uint64_t>(seeds.counts[t]);
    if (scratch.num_trees > INT32_MAX) throw std::length_error("a batch holds more than 2^31 seeds");
    for (const auto& type : node_types)
        if (disjoint && scratch.num_trees > 0 && type.num_nodes > INT64_MAX / static_cast<int64_t>(scratch.num_trees))
            throw std::length_error("nodes times seeds exceed 2^63, too many to tell a node of each tree");
    int32_t tree = 0;
    for (size_t t = 0; t < node_types.size(); ++t) {
        auto& nodes = scratch.nodes[t];
        const auto used = static_cast<uint32_t>(nodes.id.size());
        nodes.id.clear();
        nodes.tree.clear();
        nodes.per_hop.clear();
        if (nodes.hashed)
            nodes.hashed->begin(used);
        else
            nodes.direct->begin(used);
        const int64_t count = seeds.counts[t];
        nodes.id.reserve(count);
        if (nodes.hashed) nodes.hashed->reserve(count);
        if (disjoint) nodes.tree.reserve(count);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t seed = seeds.seeds[t][i];
            if (seed < 0 || seed >= node_types[t].num_nodes)
                throw std::invalid_argument("seed " + number(seed) + " is not a node: its type has " +
                                            number(node_types[t].num_nodes) + " nodes");
            nodes.id.push(seed);
            const auto position = static_cast<uint32_t>(i);
            if (disjoint) {
                nodes.tree.push(tree);
                if (temporal_) {
                    if (seeds.times[t] == nullptr && node_types[t].time == nullptr)
                        throw std::invalid_argument("seeds need a time, and neither they nor their type have one");
                    scratch.tree_time.push(seeds.times[t] ? seeds.times[t][i] : node_types[t].time[seed]);
                }
                nodes.hashed->insert(static_cast<uint64_t>(seed) * scratch.num_trees + static_cast<uint64_t>(tree++),
                                     position);
            } else if (nodes.hashed) {
                nodes.hashed->insert(static_cast<uint64_t>(seed), position);
            } else {
                nodes.direct->insert(static_cast<uint64_t>(seed), position);
            }
        }
        nodes.per_hop.push_back(count);
    }
}

template <class Row, class Table>
void Sampler::expand(Scratch& scratch, size_t r, int64_t hop, int64_t begin, int64_t end) const {
    Expansion<Row, Table>(*this, scratch, r, hop).run(begin, end);
}

// Replaces the sampled edges by all edges of the relation between sampled nodes (of one tree, when disjoint).
template <class Row, class Table>
void Sampler::induce(Scratch& scratch, size_t r) const {
    const auto& relation = relations[r];
    const auto* row = static_cast<const Row*>(relation.row);
    const auto& targets = scratch.nodes[relation.target];
    const auto& sources = scratch.nodes[relation.source];
    const Table* table = table_of<Table>(sources);
    auto& edges = scratch.edges[r];
    edges.source.clear();
    edges.position.clear();
    edges.count.clear();
    edges.count.reserve(targets.id.size());
    edges.first_target.assign(1, 0);
    edges.num_targets.assign(1, targets.id.size());
    const bool disjoint = has(STRETTO_DISJOINT);
    for (int64_t i = 0; i < targets.id.size(); ++i) {
        const int64_t v = targets.id[i], low = relation.colptr[v];
        int64_t high = relation.colptr[v + 1];
        if (relation.time) high = end_in_time(relation.time, low, high, scratch.tree_time[targets.tree[i]]);
        const int64_t before = edges.source.size();
        edges.source.reserve(high - low);
        edges.position.reserve(high - low);
        for (int64_t e = low; e < high; ++e) {
            auto key = static_cast<uint64_t>(row[e]);
            if (disjoint) key = key * scratch.num_trees + static_cast<uint64_t>(targets.tree[i]);
            const int64_t at = table->find(key);
            if (at < 0) continue;
            edges.source.push(static_cast<int32_t>(at));
            edges.position.push(e);
        }
        edges.count.push(static_cast<int32_t>(edges.source.size() - before));
    }
    edges.per_hop.assign(static_cast<size_t>(num_hops), 0);
}

void Sampler::sample(const stretto_seeds& seeds, Scratch& scratch) const {
    plant(seeds, scratch);
    for (auto& edges : scratch.edges) {
        edges.source.clear();
        edges.position.clear();
        edges.count.clear();
        edges.per_hop.clear();
        edges.first_target.clear();
        edges.num_targets.clear();
    }
    std::vector<int64_t> begin(node_types.size(), 0), end(node_types.size());
    for (int64_t hop = 0; hop < num_hops; ++hop) {
        for (size_t t = 0; t < node_types.size(); ++t) end[t] = scratch.nodes[t].id.size();
        for (size_t r = 0; r < relations.size(); ++r) {
            const auto t = static_cast<size_t>(relations[r].target);
            if (relations[r].row_bytes == 4)
                hashed_ ? expand<int32_t, HashTable>(scratch, r, hop, begin[t], end[t])
                        : expand<int32_t, DirectTable>(scratch, r, hop, begin[t], end[t]);
            else
                hashed_ ? expand<int64_t, HashTable>(scratch, r, hop, begin[t], end[t])
                        : expand<int64_t, DirectTable>(scratch, r, hop, begin[t], end[t]);
        }
        for (size_t t = 0; t < node_types.size(); ++t) {
            scratch.nodes[t].per_hop.push_back(scratch.nodes[t].id.size() - end[t]);
            if (!has(STRETTO_LAYERED)) begin[t] = end[t];
        }
    }
    if (!has(STRETTO_INDUCED)) return;
    for (size_t r = 0; r < relations.size(); ++r) {
        if (relations[r].row_bytes == 4)
            hashed_ ? induce<int32_t, HashTable>(scratch, r) : induce<int32_t, DirectTable>(scratch, r);
        else
            hashed_ ? induce<int64_t, HashTable>(scratch, r) : induce<int64_t, DirectTable>(scratch, r);
    }
}

}  // namespace stretto
