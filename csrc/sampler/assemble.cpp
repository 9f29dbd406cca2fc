// From the sampler's scratch to a slot: the layout, int64 indices as PyG wants them, and the rows of features.
#include <cstring>

#include "sampler/gather.h"
#include "sampler/sampler.h"
#include "sampler/slot.h"

namespace stretto {
namespace {

constexpr int64_t kLine = 64;

void write_edge_ids(const stretto_relation& relation, const Buffer<int64_t>& position, int64_t* out) {
    const int64_t n = position.size();
    if (relation.edge_id == nullptr) {
        if (n > 0) std::memcpy(out, position.data(), static_cast<size_t>(n) * sizeof(int64_t));
        return;
    }
    auto fill = [&](const auto* id) {
        constexpr int64_t kFar = 32;
        for (int64_t e = 0; e < n; ++e) {
            if (e + kFar < n) __builtin_prefetch(id + position[e + kFar]);
            out[e] = id[position[e]];
        }
    };
    if (relation.id_bytes == 4)
        fill(static_cast<const int32_t*>(relation.edge_id));
    else
        fill(static_cast<const int64_t*>(relation.edge_id));
}

void write_edges(const SampledEdges& edges, int64_t* row, int64_t* col) {
    const int64_t n = edges.source.size();
    for (int64_t e = 0; e < n; ++e) row[e] = edges.source[e];
    constexpr int32_t kSteps = 8;  // a short run is written in one length, the next one over what is too much
    const int32_t* count = edges.count.data();
    const int64_t* const last = col + n - kSteps;
    for (size_t h = 0; h < edges.first_target.size(); ++h) {
        for (int64_t i = 0; i < edges.num_targets[h]; ++i) {
            const int64_t target = edges.first_target[h] + i;
            const int32_t c = *count++;
            if (c <= kSteps && col <= last)
                for (int32_t s = 0; s < kSteps; ++s) col[s] = target;
            else
                for (int32_t s = 0; s < c; ++s) col[s] = target;
            col += c;
        }
    }
}

// Not for layered samples: there a target has edges of several hops.
void write_rowptr(const SampledEdges& edges, int64_t num_targets, int64_t* rowptr) {
    int64_t sum = 0, i = 0;
    for (; i < edges.count.size(); ++i) {
        rowptr[i] = sum;
        sum += edges.count[i];
    }
    for (; i <= num_targets; ++i) rowptr[i] = sum;
}

}  // namespace

void assemble(const Sampler& sampler, const Scratch& scratch, Pool& pool, stretto_slot* slot) {
    const bool disjoint = sampler.has(STRETTO_DISJOINT), csr = sampler.has(STRETTO_CSR);
    auto& table = slot->table;
    table.assign(2, 0);
    int64_t bytes = 0;
    auto place = [&](int64_t size) {
        const int64_t at = bytes;
        bytes += (size + kLine - 1) / kLine * kLine;
        return at;
    };
    constexpr int64_t kWide = sizeof(int64_t);

    std::vector<int64_t> id_at, tree_at;
    for (const auto& nodes : scratch.nodes) {
        const int64_t n = nodes.id.size();
        id_at.push_back(place(n * kWide));
        tree_at.push_back(disjoint ? place(n * kWide) : -1);
        table.insert(table.end(), {n, id_at.back(), tree_at.back()});
        table.insert(table.end(), nodes.per_hop.begin(), nodes.per_hop.end());
    }
    bool sliced_edges = false;
    for (const auto& slice : sampler.slices) sliced_edges |= slice.of_edges != 0;
    struct EdgePlaces {
        int64_t index, rowptr, col, id;
    };
    std::vector<EdgePlaces> edge_at;
    for (size_t r = 0; r < scratch.edges.size(); ++r) {
        const auto& edges = scratch.edges[r];
        const int64_t n = edges.source.size(), targets = scratch.nodes[sampler.relations[r].target].id.size();
        EdgePlaces at{place(2 * n * kWide), -1, -1, -1};
        if (csr) at.rowptr = place((targets + 1) * kWide);
        if (csr) at.col = place(n * static_cast<int64_t>(sizeof(int32_t)));
        if (sliced_edges || sampler.has(STRETTO_EDGE_ID)) at.id = place(n * kWide);
        edge_at.push_back(at);
        table.insert(table.end(), {n, at.index, at.rowptr, at.col, at.id});
        table.insert(table.end(), edges.per_hop.begin(), edges.per_hop.end());
    }
    auto rows_of = [&](const stretto_slice& slice) {
        return slice.of_edges ? scratch.edges[slice.type].source.size() : scratch.nodes[slice.type].id.size();
    };
    std::vector<int64_t> slice_at;
    for (const auto& slice : sampler.slices) {
        const int64_t row_bytes =
            slice.columns > 0 ? slice.columns * static_cast<int64_t>(sizeof(float)) : slice.row_bytes;
        slice_at.push_back(place(rows_of(slice) * row_bytes));
        table.push_back(slice_at.back());
    }

    pool.grow(slot, bytes > 0 ? bytes : kLine);
    uint8_t* base = slot->data;
    table[0] = reinterpret_cast<int64_t>(base);
    table[1] = slot->bytes;
    auto wide = [&](int64_t at) { return reinterpret_cast<int64_t*>(base + at); };

    for (size_t t = 0; t < scratch.nodes.size(); ++t) {
        const auto& nodes = scratch.nodes[t];
        const int64_t n = nodes.id.size();
        if (n > 0) std::memcpy(wide(id_at[t]), nodes.id.data(), static_cast<size_t>(n * kWide));
        if (disjoint)
            for (int64_t i = 0; i < n; ++i) wide(tree_at[t])[i] = nodes.tree[i];
    }
    for (size_t r = 0; r < scratch.edges.size(); ++r) {
        const auto& edges = scratch.edges[r];
        const auto& at = edge_at[r];
        const int64_t n = edges.source.size();
        write_edges(edges, wide(at.index), wide(at.index) + n);
        if (csr) {
            write_rowptr(edges, scratch.nodes[sampler.relations[r].target].id.size(), wide(at.rowptr));
            if (n > 0) std::memcpy(base + at.col, edges.source.data(), static_cast<size_t>(n) * sizeof(int32_t));
        }
        if (at.id >= 0) write_edge_ids(sampler.relations[r], edges.position, wide(at.id));
    }
    for (size_t s = 0; s < sampler.slices.size(); ++s) {
        const auto& slice = sampler.slices[s];
        const int64_t* index = slice.of_edges ? wide(edge_at[slice.type].id) : wide(id_at[slice.type]);
        uint8_t* out = base + slice_at[s];
        if (slice.columns > 0)
            gather_scaled(slice, index, rows_of(slice), reinterpret_cast<float*>(out));
        else
            gather_rows(slice, index, rows_of(slice), out);
    }
}

}  // namespace stretto
