"""`stretto train` and `stretto convert`: learning, checkpoints that continue bit for bit, readers of files."""

import gzip

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from typer.testing import CliRunner

from stretto.cli import app
from stretto.compile import choose
from stretto.convert import read, read_ogb
from stretto.errors import StrettoError
from stretto.loader import Store
from stretto.train import Run, train
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
