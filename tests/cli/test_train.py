"""`stretto train` and `stretto convert`: learning, checkpoints that continue bit for bit, readers of files."""

import copy
import gzip
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.data.collate import collate
from typer.testing import CliRunner

from stretto.cli import app
from stretto.cli.convert import read, read_ogb
from stretto.cli.train import Run, train
from stretto.compile import choose
from stretto.errors import StrettoError
from stretto.loader import Store
from tests.conftest import ROOT
from tests.loader.data import homogeneous

RUN = Run("", "sage", (4, 3), hidden=16, batch=50, lr=0.01)


def small() -> Data:
    data = homogeneous()
    data.x[:, 0] = data.y.float()  # something to learn
    return data


def losses(outcome):
    return [(e.number, e.loss, e.val) for e in outcome.epochs]


@pytest.mark.parametrize("fast", [False, True])
def test_training_learns(fast):
    outcome = train(RUN, epochs=8, data=small(), fast=fast)
    assert outcome.epochs[-1].loss < 0.9 * outcome.epochs[0].loss
    assert outcome.test > 0.35
    assert all(0 <= e.waiting <= 1 for e in outcome.epochs)


def test_a_resumed_run_continues_bit_for_bit(tmp_path):
    whole = train(RUN, epochs=6, data=small(), threads=1)
    file = tmp_path / "c.pt"
    train(RUN, epochs=2, data=small(), threads=2, checkpoint=file)
    torch.rand(5)  # another process has another random state
    resumed = train(RUN, epochs=6, data=small(), threads=1, checkpoint=file)
    assert losses(whole) == losses(resumed)
    assert whole.test == resumed.test
    assert losses(train(RUN, epochs=6, data=small(), checkpoint=file)) == losses(whole)  # nothing left to do
    with pytest.raises(StrettoError, match="hidden"):
        train(Run("", "sage", (4, 3), hidden=8, batch=50, lr=0.01), epochs=1, data=small(), checkpoint=file)


def test_what_resumes_does_not_depend_on_what_was_timed(tmp_path, monkeypatch):
    """All plans are worth timing here, and differ in their last bits: who resumes must not choose another."""
    monkeypatch.setenv("STRETTO_TUNE", "on")
    monkeypatch.setattr(choose, "SMALL", 0)
    monkeypatch.setattr(choose, "CLOSE", 1e9)
    choose.CHOOSER.clear()
    whole = train(RUN, epochs=6, data=small())
    file = tmp_path / "c.pt"
    train(RUN, epochs=3, data=small(), checkpoint=file)
    choose.CHOOSER.clear()
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "another"))
    assert losses(train(RUN, epochs=6, data=small(), checkpoint=file)) == losses(whole)
    assert not torch.are_deterministic_algorithms_enabled()
    choose.CHOOSER.clear()


def test_commands(tmp_path):
    runner = CliRunner()
    folder = tmp_path / "cora"
    done = runner.invoke(app, ["convert", "cora", str(folder), "--features", "fp16"])
    assert done.exit_code == 0, done.output
    assert Store(folder).num_nodes == 2708
    arguments = [
        "train",
        "--graph",
        str(folder),
        "--fanout",
        "5,5",
        "--hidden",
        "16",
        "--epochs",
        "1",
        "--batch",
        "256",
    ]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "waiting for batches" in done.output
    assert "test" in done.output


def test_readers(tmp_path):
    data = homogeneous()
    torch.save(data, tmp_path / "d.pt")
    assert torch.equal(read(str(tmp_path / "d.pt")).x, data.x)
    torch.save([1], tmp_path / "bad.pt")
    with pytest.raises(StrettoError, match="wanted a Data"):
        read(str(tmp_path / "bad.pt"))
    with pytest.raises(StrettoError, match="no OGB folder"):
        read_ogb(tmp_path)

    raw = tmp_path / "ogbn_x" / "raw"
    split = tmp_path / "ogbn_x" / "split" / "time"
    raw.mkdir(parents=True)
    split.mkdir(parents=True)

    def write(path, rows):
        with gzip.open(path, "wt") as file:
            np.savetxt(file, np.atleast_2d(rows), delimiter=",", fmt="%g")

    write(raw / "edge.csv.gz", [[0, 1], [1, 2], [2, 0]])
    write(raw / "num-node-list.csv.gz", [[4]])
    write(raw / "node-feat.csv.gz", np.arange(8.0).reshape(4, 2))
    write(raw / "node-label.csv.gz", [[0], [1], [0], [1]])
    write(split / "train.csv.gz", [[0], [1]])
    write(split / "valid.csv.gz", [[2]])
    write(split / "test.csv.gz", [[3]])
    found = read(str(tmp_path / "ogbn_x"))
    assert found.edge_index.tolist() == [[0, 1, 2], [1, 2, 0]]
    assert found.x.tolist()[3] == [6.0, 7.0]
    assert found.y.tolist() == [0, 1, 0, 1]
    assert found.train_mask.tolist() == [True, True, False, False]
    assert found.val_mask.tolist() == [False, False, True, False]


class Evil:
    """Runs a command when a pickle that holds it is read."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_nothing_that_a_file_names_is_run(tmp_path):
    """Neither by convert nor by train; what needs more than PyG's classes says so and how it is trusted."""
    traces = tmp_path / "it ran"
    data = small()
    data.evil = Evil(f"touch '{traces}'")
    for number, content in enumerate((data, data.evil, (data, None), {"x": data.evil}, [data.evil])):
        file = tmp_path / f"evil{number}.pt"
        torch.save(content, file, _use_new_zipfile_serialization=number % 2 == 0)
        for words in (["convert", str(file), str(tmp_path / "out")], ["train", "--graph", str(file)]):
            with pytest.raises(StrettoError, match=rf"{file.name}' names \w+\.system, .*--trust-pickle"):
                CliRunner().invoke(app, words, catch_exceptions=False)
    assert not traces.exists()
    assert not (tmp_path / "out").exists()
    with pytest.raises(StrettoError, match="holds int"):
        read(str(tmp_path / "evil1.pt"), trust_pickle=True)
    assert traces.exists()


def test_trusted_files_may_hold_more(tmp_path):
    file = tmp_path / "batch.pt"
    data = small()
    torch.save(Batch.from_data_list([data, data]), file)
    with pytest.raises(StrettoError, match="--trust-pickle"):
        read(str(file))
    done = CliRunner().invoke(app, ["convert", str(file), str(tmp_path / "store"), "--trust-pickle"])
    assert done.exit_code == 0, done.output
    assert Store(tmp_path / "store").num_nodes == 2 * data.num_nodes


@pytest.mark.parametrize("own", [True, False], ids=["our names alone", "with those of PyG"])
def test_every_kind_of_graph_that_pyg_writes_is_read(tmp_path, own):
    """Also by a PyG that tells torch none of its classes, as older ones do."""
    data = Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]))
    indexed = copy.copy(data)
    indexed.edge_index = EdgeIndex(data.edge_index, sparse_size=(3, 3)).sort_by("col")[0]
    sparse = copy.copy(data)
    sparse.adj_t = torch.eye(3).to_sparse_csr()
    stored = Data(x=torch.ones(2, 2))
    stored.put_edge_index((torch.tensor([0]), torch.tensor([1])), layout="coo", size=(2, 2))
    hetero = HeteroData()
    hetero["a"].x = torch.ones(2, 1)
    hetero["a", "to", "a"].edge_index = torch.zeros(2, 1, dtype=torch.int64)
    collated = collate(Data, [data, copy.copy(data)], increment=False, add_batch=False)
    known = torch.serialization.get_safe_globals()
    try:
        if own:
            torch.serialization.clear_safe_globals()
        assert stored.is_node_attr("x")  # which PyG remembers in the storage
        for content in (data, indexed, sparse, stored, hetero, data.to_dict(), (*collated[:2], Data)):
            torch.save(content, tmp_path / "graph.pt")
            found = read(str(tmp_path / "graph.pt"))
            assert isinstance(found, (Data, HeteroData))
            assert found.num_nodes in (2, 3, 6)
        assert own == (not torch.serialization.get_safe_globals())
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(known)


def test_a_damaged_graph_file_is_told(tmp_path):
    file = tmp_path / "graph.pt"
    torch.save(small(), file)
    whole = file.read_bytes()
    for content in (b"", b"abc", whole[: len(whole) // 2], b"\x80\x02" + whole):
        file.write_bytes(content)
        with pytest.raises(StrettoError, match=r"graph\.pt' cannot be read"):
            read(str(file))
    with pytest.raises(StrettoError, match="no file"):
        read(str(tmp_path / "nowhere.pt"))


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path):
    file = tmp_path / "c.pt"
    train(RUN, epochs=1, data=small(), checkpoint=file)
    whole = file.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]
    flips = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), len(whole) // 40)]
    for content in (b"", whole[:10], whole[:-1], whole + b"\0", whole.partition(b"\n")[2], *flips):
        file.write_bytes(content)
        with pytest.raises(StrettoError, match=r"c\.pt' is (damaged|no checkpoint)"):
            train(RUN, epochs=2, data=small(), checkpoint=file)
    file.write_bytes(whole)
    assert len(train(RUN, epochs=2, data=small(), checkpoint=file).epochs) == 2
    other = small()
    other.x = other.x[:, :3].contiguous()
    with pytest.raises(StrettoError, match=r"c\.pt does not fit the graph"):
        train(RUN, epochs=3, data=other, checkpoint=file)


def test_a_checkpoint_that_cannot_be_written_is_told_before_the_first_epoch(tmp_path):
    (tmp_path / "file").write_text("")
    told = []
    for path in (tmp_path / "nowhere" / "c.pt", tmp_path, tmp_path / "file" / "c.pt"):
        with pytest.raises(StrettoError, match="cannot be written"):
            train(RUN, epochs=1, data=small(), checkpoint=path, tell=told.append)
    assert not told


TRAIN = """
import sys
from pathlib import Path
from tests.cli.test_train import RUN, small
from stretto.cli.train import train
train(RUN, epochs=10**6, data=small(), checkpoint=Path(sys.argv[1]), tell=lambda epoch: print(epoch.number, flush=True))
"""


def test_a_run_that_is_killed_resumes_bit_for_bit(tmp_path):
    file = tmp_path / "c.pt"
    with subprocess.Popen([sys.executable, "-c", TRAIN, str(file)], stdout=subprocess.PIPE, cwd=ROOT) as trainer:
        trainer.stdout.readline()
        time.sleep(random.Random(2).random() / 10)
        trainer.kill()
    count = len(train(RUN, epochs=0, data=small(), checkpoint=file).epochs)
    assert count >= 1
    resumed = train(RUN, epochs=count + 2, data=small(), checkpoint=file)
    assert losses(resumed) == losses(train(RUN, epochs=count + 2, data=small()))
