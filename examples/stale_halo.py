"""Full-graph training on Cora in two processes, remote rows 0, 1 and 2 steps old: losses, accuracy, ages, traffic.

python examples/stale_halo.py                 # a two-layer GCN
python examples/stale_halo.py sage 30         # another model (gcn, sage, gin) and number of steps
"""

import sys
from functools import partial

import torch

from stretto import datasets, dist
from stretto.observe.models import as_data, make

name = sys.argv[1] if len(sys.argv) > 1 else "gcn"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 40
cora = datasets.load_graph("cora")
data = as_data(cora)
model = make(name, data.x.size(1), 16, 7)

# Each process owns a part of the nodes; before a layer it needs the rows of its neighbours in the other part, its halo.
owner = dist.partition(data.edge_index, data.num_nodes, parts=2)
for rank in range(2):
    part = dist.Part.of(data.edge_index, owner, rank)
    print(f"rank {rank}: {part.own.numel()} nodes, {part.interior} of them need no others; halo {part.halo.numel()}")

# s = 0 is the synchronous step: the same losses as in one process. s = 1 is PipeGCN: the exchange has a step's time.
runs = {}
for s in (0, 1, 2):
    runs[s] = dist.train(
        model,
        data,
        owner,
        steps=steps,
        optimizer=partial(torch.optim.Adam, lr=0.01),
        staleness=dist.Staleness.halo(s),
        schedule=dist.Schedule(micro="async", macro="async"),
    )

print("\nloss     " + "".join(f"   s = {s}" for s in runs))
for step in sorted({*range(0, steps, max(1, steps // 8)), steps - 1}):
    print(f"step {step:3d} " + "".join(f"  {run.losses[step]:6.4f}" for run in runs.values()))

test = cora.masks["test"]
for s, run in runs.items():
    right = (run.predictions.argmax(dim=-1) == data.y)[test].double().mean()
    ages = [reading.age.steps for reading in run.ages if reading.slot == "remote"]
    sent = run.sent()
    print(
        f"\ns = {s}: test accuracy {right:.3f}; remote rows {sum(ages) / len(ages):.2f} steps old on average and "
        f"{max(ages)} at most; a step sends {sent['bytes'] / 1e6:.2f} MB in {sent['messages']} messages and waits for "
        f"the other rank {sent['syncs']} times"
    )

# When did rank 0 do what in its last step? Milliseconds from its first event.
for s in (0, 1):
    events = [e for e in runs[s].events if e.rank == 0 and e.step == steps - 1]
    print(f"\ns = {s}, rank 0, step {steps - 1}")
    for e in events:
        begin, end = ((t - events[0].begin) * 1e3 for t in (e.begin, e.end))
        print(f"  {begin:7.2f} .. {end:7.2f}  {e.phase:8}  layer {e.layer}  {e.kind:9}  {e.rows}")
