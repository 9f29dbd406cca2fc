"""Train GraphSAGE on sampled batches: PyG's documented loop with one import changed and two lines added.

python examples/train_sampled.py                        # cora, CPU
python examples/train_sampled.py --graph rmat:19:7000000 --device cuda
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from stretto.datasets import load_graph
from stretto.loader import NeighborLoader  # was: from torch_geometric.loader import NeighborLoader
from stretto.plug.accelerate import accelerate

parser = argparse.ArgumentParser()
parser.add_argument("--graph", default="cora")
parser.add_argument("--fanout", default="15,10,5")
parser.add_argument("--batch", type=int, default=1024)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--method", default="uniform", help="uniform or labor")
parser.add_argument("--device", default="cpu")
parser.add_argument("--stock", action="store_true", help="leave the layers as PyG has them")
arguments = parser.parse_args()

found = load_graph(arguments.graph)
torch.manual_seed(0)
data = Data(edge_index=found.edge_index, num_nodes=found.num_nodes)
data.x = found.x if found.x is not None else torch.randn(found.num_nodes, 100)
data.y = found.y if found.y is not None else torch.randint(0, 47, (found.num_nodes,))
train_nodes = torch.randperm(found.num_nodes)[: max(1, found.num_nodes // 4)]

fanout = [int(k) for k in arguments.fanout.split(",")]
loader = NeighborLoader(
    data,
    num_neighbors=fanout,
    input_nodes=train_nodes,
    batch_size=arguments.batch,
    shuffle=True,
    method=arguments.method,
    num_threads=arguments.threads,
    device=arguments.device,  # batches arrive there, copied ahead of time
)
model = GraphSAGE(data.x.size(1), arguments.hidden, len(fanout), int(data.y.max()) + 1).to(arguments.device)
if not arguments.stock:
    model = accelerate(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

for epoch in range(arguments.epochs):
    start, waited, total = time.perf_counter(), 0.0, 0.0
    batches = iter(loader)
    for _ in range(len(loader)):
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
        total += float(loss.detach())
    seconds = time.perf_counter() - start
    print(
        f"epoch {epoch}: loss {total / len(loader):.4f}, {seconds:.2f} s, "
        f"{seconds / len(loader) * 1e3:.2f} ms per batch, {waited / seconds:.1%} waiting for batches"
    )
