"""The operators by themselves: a GraphSAGE layer and an attention layer written on stretto.ops, on the embedded Cora.

python examples/ops.py
"""

import torch

import stretto
from stretto import datasets, ops

cora = datasets.load_graph("cora")
graph = stretto.Graph.of(cora.edge_index, cora.num_nodes)
print(graph)

torch.manual_seed(0)
x = torch.randn(cora.num_nodes, 64)
weight = torch.nn.Parameter(torch.randn(64, 16) / 8)
h = x @ weight

# GraphSAGE: the mean over neighbours. Backward runs on graph.T, which is made once and kept.
mean = ops.spmm(graph, h, reduce="mean")
mean.square().sum().backward()
print("mean", list(mean.shape), "gradient norm", f"{weight.grad.norm():.3f}")

# GCN: both sides scaled by degree ** -1/2, fused into the aggregation, no weight array.
loops = graph.with_self_loops
scale = loops.degree_power(-0.5, torch.float32)
print("gcn", list(ops.spmm(loops, h, row_scale=scale, col_scale=scale).shape))

# Attention with 4 heads: scores on the edges, softmax over each node's edges, weighted sum.
q, k, v = (torch.randn(cora.num_nodes, 4, 8) for _ in range(3))
alpha = ops.edge_softmax(graph, ops.sddmm(graph, q, k) / 8**0.5)
print("attention", list(ops.spmm(graph, v, alpha).shape))

# Any messages, in the order of the edges, unsorted: no atomics, the same result for any number of threads.
messages = torch.randn(cora.num_edges, 16)
print("max", list(ops.segment_reduce(messages, cora.edge_index[1], cora.num_nodes, reduce="max").shape))
