"""A batch of few nodes is a few Python calls: what a loader does there is felt in every step."""

import sys

import pytest
import torch
from torch_geometric.data import Data

from stretto import Graph, NeighborLoader
from stretto.kernels import native

LIMIT = 45


def test_a_batch_is_few_python_calls():
    if native.library() is None:
        pytest.skip(native.why_not())
    data = Data(x=torch.randn(500, 4), y=torch.zeros(500), edge_index=torch.randint(500, (2, 4000)))
    batches = iter(NeighborLoader(data, [5, 5], batch_size=8, num_threads=1))
    for _ in range(10):
        next(batches)
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        batch = next(batches)
    finally:
        sys.setprofile(None)
    assert {"x", "y", "edge_index", "n_id", "e_id", "input_id", "batch_size", "num_sampled_nodes"} <= set(batch.keys())
    assert len(calls) <= LIMIT, calls


def test_a_graph_that_is_made_when_it_is_asked_for_is_ordinary():
    """Its arrays may be saved for backward, though it is asked for in inference mode first."""
    if native.library() is None:
        pytest.skip(native.why_not())
    data = Data(x=torch.randn(50, 4), edge_index=torch.randint(50, (2, 400)))
    batch = next(iter(NeighborLoader(data, [5, 5], batch_size=8)))
    with torch.inference_mode():
        graph = Graph.of(batch.edge_index, batch.num_nodes)
    assert not graph.csr.rowptr.is_inference()
    assert Graph.of(batch.edge_index, batch.num_nodes) is graph
    assert Graph.known(batch.edge_index) == [graph]
