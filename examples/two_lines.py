"""Two lines make a PyG model fast: a GraphSAGE on a power-law graph of arXiv size, stock and accelerated.

python examples/two_lines.py
"""

import time

import torch
from torch_geometric.nn import GraphSAGE

import stretto  # line one
from stretto import datasets

graph = datasets.load_graph("rmat:17:1200000")
torch.manual_seed(0)
x, y = torch.randn(graph.num_nodes, 128), torch.randint(40, (graph.num_nodes,))
model = GraphSAGE(128, 256, num_layers=2, out_channels=40)


def step() -> float:
    start = time.perf_counter()
    loss = torch.nn.functional.cross_entropy(model(x, graph.edge_index), y)
    loss.backward()
    print(f"  loss {loss.item():.5f}  {time.perf_counter() - start:.2f} s")


for title in ("stock", "accelerated"):
    print(title)
    if title == "accelerated":
        stretto.accelerate(model)  # line two
    for _ in range(4):
        model.zero_grad()
        step()
print(stretto.report(model))
