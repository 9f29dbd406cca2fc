"""Two lines make a PyG model fast: a GraphSAGE on a power-law graph of arXiv size, as it is and with them added.

python examples/two_lines.py [GRAPH]
"""

import sys
import time

import torch
from torch_geometric.nn import GraphSAGE

import stretto  # line one
from stretto import datasets
from stretto.observe.peak_memory import peak_bytes

graph = datasets.load_graph((sys.argv[1:] or ["rmat:17:1200000"])[0])
x, y = torch.randn(graph.num_nodes, 128), torch.randint(40, (graph.num_nodes,))
ms, peak, loss = {}, {}, {}
for name in ("stock PyG", "stretto"):
    torch.manual_seed(0)
    model = GraphSAGE(128, 256, num_layers=2, out_channels=40)
    if name == "stretto":
        stretto.accelerate(model)  # line two
    optimizer = torch.optim.Adam(model.parameters())

    def step(model=model, optimizer=optimizer, name=name) -> None:
        optimizer.zero_grad()
        loss[name] = torch.nn.functional.cross_entropy(model(x, graph.edge_index), y)
        loss[name].backward()
        optimizer.step()

    for _ in range(8):  # the last counts: the first ones choose plans and kernels
        start = time.perf_counter()
        step()
        ms[name] = 1e3 * (time.perf_counter() - start)
    peak[name] = peak_bytes(step) / 2**20
    print(f"{name:10} {ms[name]:8.0f} ms a step {peak[name]:8.0f} MiB at its peak    loss {loss[name].item():.6f}")
times, apart = ms["stock PyG"] / ms["stretto"], abs(loss["stock PyG"] - loss["stretto"]).item()
print(f"{times:.1f} times as fast; the losses of ten steps differ by {apart:.1e}\n{stretto.report(model)}")
