#include "sampler/sampler.h"

#include <unistd.h>

#include <stdexcept>
#include <string>

namespace stretto {
namespace {

// Nodes per pass. The passes over a block hide one cache miss each: colptr, row, table.
constexpr int64_t kBlock = 16;
// Above this many nodes a table entry per node no longer stays in cache, and a hash table of the batch's size wins.
constexpr int64_t kMostDirect = int64_t{1} << 24;

// Fan-outs up to this are written in loops of one length.
constexpr int64_t kSteps = 16;

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

// Edges of a target are sorted by time, so those not after `time` are a prefix.
int64_t Sampler::end_in_time(const int64_t* edge_time, int64_t low, int64_t high, int64_t time) {
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (edge_time[middle] <= time)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// The same for a block of targets, in step with each other, so that their cache misses overlap.
void Sampler::ends_in_time(const int64_t* edge_time, int64_t size, const int64_t* low, const int64_t* time,
                           int64_t* high) {
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

// Samples the neighbours of targets [begin, end) of the relation's target type and appends what is new to the sources.
template <class Row, class Table>
void Sampler::expand(Scratch& scratch, size_t r, int64_t hop, int64_t begin, int64_t end) const {
    const auto& relation = relations[r];
    const auto* row = static_cast<const Row*>(relation.row);
    const int64_t* colptr = relation.colptr;
    const int64_t fanout = fanouts[r][hop];
    const bool replace = has(STRETTO_REPLACE), disjoint = has(STRETTO_DISJOINT), last = has(STRETTO_LAST);
    const bool labor = has(STRETTO_LABOR);
    // A node with few neighbours writes as many entries as one with many, and takes what it has: loops of one length
    // are guessed right.
    const int64_t steps = fanout <= kSteps ? std::max(fanout, int64_t{0}) : 0;
    auto& targets = scratch.nodes[relation.target];
    auto& sources = scratch.nodes[relation.source];
    auto& edges = scratch.edges[r];
    Table* table = nullptr;
    if constexpr (std::is_same_v<Table, DirectTable>)
        table = sources.direct.get();
    else
        table = sources.hashed.get();
    const uint64_t key = combine(combine(scratch.batch_key, static_cast<uint64_t>(hop)), r);
    const uint64_t labor_key =
        has(STRETTO_SHARED) ? combine(scratch.batch_key, UINT64_MAX - 1) : combine(key, UINT64_MAX - 1);

    edges.count.reserve(end - begin);
    edges.first_target.push_back(begin);
    edges.num_targets.push_back(end - begin);
    const int64_t edges_before = edges.source.size();
    int64_t low[kBlock], high[kBlock];
    int64_t times[kBlock];
    uint64_t keys[kBlock];

    for (int64_t i = begin; i < std::min(begin + kBlock, end); ++i) __builtin_prefetch(colptr + targets.id[i]);
    for (int64_t block = begin; block < end; block += kBlock) {
        const int64_t size = std::min(kBlock, end - block);
        for (int64_t i = block + size; i < std::min(block + size + kBlock, end); ++i)
            __builtin_prefetch(colptr + targets.id[i]);

        for (int64_t i = 0; i < size; ++i) {
            const int64_t v = targets.id[block + i];
            low[i] = colptr[v];
            high[i] = colptr[v + 1];
            keys[i] = combine(key, static_cast<uint64_t>(v));
            if (disjoint) keys[i] = combine(keys[i], static_cast<uint64_t>(targets.tree[block + i]));
            if (relation.time) times[i] = scratch.tree_time[targets.tree[block + i]];
        }
        if (relation.time) ends_in_time(relation.time, size, low, times, high);
        int64_t bound = 0;
        for (int64_t i = 0; i < size; ++i) {
            const int64_t degree = high[i] - low[i];
            bound += fanout < 0 || (degree < fanout && !replace) ? degree : fanout;
        }
        edges.position.reserve(bound + steps);
        edges.source.reserve(bound);
        const int64_t start = edges.position.size();

        int64_t* out = edges.position.data() + start;
        int32_t* count = edges.count.data() + edges.count.size();
        for (int64_t i = 0; i < size; ++i) {
            const int64_t n = high[i] - low[i];
            int64_t taken = n;
            if (n == 0 || fanout < 0 || (n <= fanout && !replace && relation.running == nullptr)) {
                pick_all(low[i], std::max(n, steps), out);
                __builtin_prefetch(row + low[i]);
                __builtin_prefetch(row + high[i] - 1);
            } else {
                Stream stream(keys[i]);
                if (relation.running != nullptr)
                    taken =
                        pick_weighted(stream, relation.running + low[i], low[i], n, fanout, replace, scratch.pick, out);
                else if (last)
                    taken = pick_all(high[i] - std::min(fanout, n), std::min(fanout, n), out);
                else if (replace)
                    taken = pick_replace(stream, low[i], n, fanout, out);
                else if (labor)
                    taken = pick_labor(labor_key, row, low[i], n, fanout, scratch.pick, out);
                else
                    taken = pick_uniform(stream, low[i], n, fanout, scratch.pick, out);
                for (int64_t e = 0; e < taken; ++e) __builtin_prefetch(row + out[e]);
            }
            out += taken;
            count[i] = static_cast<int32_t>(taken);
        }
        const int64_t added = out - (edges.position.data() + start);
        edges.position.set_size(start + added);
        edges.source.set_size(start + added);
        edges.count.set_size(edges.count.size() + size);
        sources.id.reserve(added);
        if (disjoint) sources.tree.reserve(added);
        table->reserve(added);

        const int64_t* position = edges.position.data() + start;
        int32_t* source = edges.source.data() + start;
        int64_t* ids = sources.id.data();
        int64_t num_sources = sources.id.size();
        if (num_sources + added > INT32_MAX) throw std::length_error("a batch holds more than 2^31 nodes");
        if (!disjoint) {
            for (int64_t e = 0; e < added; ++e) table->prefetch(static_cast<uint64_t>(row[position[e]]));
            for (int64_t e = 0; e < added; ++e) {
                const auto v = static_cast<int64_t>(row[position[e]]);
                const Place place = table->insert(static_cast<uint64_t>(v), static_cast<uint32_t>(num_sources));
                ids[num_sources] = v;  // written always, kept only if new
                num_sources += place.is_new;
                source[e] = static_cast<int32_t>(place.position);
            }
        } else {
            const uint64_t trees = scratch.num_trees;
            int32_t* tree_of = sources.tree.data();
            for (int64_t i = 0, e = 0; i < size; ++i) {
                const auto tree = static_cast<uint64_t>(targets.tree[block + i]);
                for (const int64_t stop = e + count[i]; e < stop; ++e)
                    table->prefetch(static_cast<uint64_t>(row[position[e]]) * trees + tree);
            }
            for (int64_t i = 0, e = 0; i < size; ++i) {
                const int32_t tree = targets.tree[block + i];
                for (const int64_t stop = e + count[i]; e < stop; ++e) {
                    const auto v = static_cast<int64_t>(row[position[e]]);
                    const Place place = table->insert(static_cast<uint64_t>(v) * trees + static_cast<uint64_t>(tree),
                                                      static_cast<uint32_t>(num_sources));
                    ids[num_sources] = v;
                    tree_of[num_sources] = tree;
                    num_sources += place.is_new;
                    source[e] = static_cast<int32_t>(place.position);
                }
            }
            sources.tree.set_size(num_sources);
        }
        sources.id.set_size(num_sources);
    }
    edges.per_hop.push_back(edges.source.size() - edges_before);
}

// Replaces the sampled edges by all edges of the relation between sampled nodes (of one tree, when disjoint).
template <class Row, class Table>
void Sampler::induce(Scratch& scratch, size_t r) const {
    const auto& relation = relations[r];
    const auto* row = static_cast<const Row*>(relation.row);
    const auto& targets = scratch.nodes[relation.target];
    const auto& sources = scratch.nodes[relation.source];
    const Table* table = nullptr;
    if constexpr (std::is_same_v<Table, DirectTable>)
        table = sources.direct.get();
    else
        table = sources.hashed.get();
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
