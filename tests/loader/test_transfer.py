"""The order of calls of the asynchronous copy, on a CPU with streams that only take notes."""

import time
from contextlib import contextmanager

import pytest
import torch

from stretto.loader import NeighborLoader
from stretto.loader.stream import Stream
from stretto.loader.transfer import Transfer, pinning
from tests.loader.data import check, homogeneous


class Notes:
    """torch.cuda's streams and events, which note what is done in which order."""

    def __init__(self, done: bool = True) -> None:
        self.log: list[str] = []
        self.done = done
        notes = self

        class Event:
            def __init__(self) -> None:
                self.number = sum(line.startswith("record") for line in notes.log)

            def record(self, stream: "Stream") -> None:
                notes.log.append(f"record {self.number} on {stream.name}")

            def query(self) -> bool:
                return notes.done

            def synchronize(self) -> None:
                notes.log.append(f"synchronize {self.number}")

        class Stream:
            def __init__(self, device: object = None, name: str = "side") -> None:
                self.name = name

            def wait_event(self, event: Event) -> None:
                notes.log.append(f"{self.name} waits for {event.number}")

        self.Event, self.Stream = Event, Stream
        self._main = Stream(name="main")

    def current_stream(self, device: object):
        return self._main

    @contextmanager
    def stream(self, stream):
        self.log.append(f"enter {stream.name}")
        yield
        self.log.append(f"leave {stream.name}")


@pytest.fixture
def no_record_stream(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)


def stream_of(loader: NeighborLoader, notes: Notes) -> Stream:
    stream = loader._new_stream()
    stream.transfer = Transfer(torch.device("cpu"), notes)
    return stream


@pytest.mark.usefixtures("no_record_stream")
def test_copy_runs_on_the_side_stream_and_the_main_stream_waits():
    data = homogeneous()
    loader = NeighborLoader(data, [4], batch_size=50)
    notes = Notes()
    stream = stream_of(loader, notes)
    stream.begin(1, 0)
    end = time.monotonic() + 60
    while stream.engine.state()["prepared"] < 2:  # both batches of the copies below
        assert time.monotonic() < end, "no batch was prepared"
        time.sleep(0.001)
    slot, task = stream.next()
    assert notes.log[:4] == ["enter side", "record 0 on side", "leave side", "main waits for 0"]
    # The copy of batch 1 is begun before batch 0 is handed out, and nobody waits for it yet.
    assert notes.log[4:] == ["enter side", "record 1 on side", "leave side"]
    check(loader._batch(slot, task), data)
    slot, task = stream.next()
    assert "main waits for 1" in notes.log
    check(loader._batch(slot, task), data)


@pytest.mark.usefixtures("no_record_stream")
def test_host_memory_is_kept_until_its_copy_ended():
    loader = NeighborLoader(homogeneous(), [4], batch_size=50)
    notes = Notes(done=False)
    stream = stream_of(loader, notes)
    stream.begin(1, 0)
    taken = [stream.next() for _ in range(3)]
    assert len(stream.transfer._flying) >= 3
    notes.done = True
    taken.append(stream.next())
    assert len(stream.transfer._flying) <= 1
    stream.transfer.finish()
    assert not stream.transfer._flying


@pytest.mark.usefixtures("no_record_stream")
def test_a_whole_epoch_arrives_in_order_through_the_transfer():
    data = homogeneous()
    loader = NeighborLoader(data, [4, 3], batch_size=32)
    stream = stream_of(loader, Notes())
    for epoch in range(3):
        stream.begin(1, epoch)
        seen = []
        while (found := stream.next()) is not None:
            batch = loader._batch(*found)
            check(batch, data)
            seen.append(batch.input_id)
        assert torch.equal(torch.cat(seen), torch.arange(300))


def test_nothing_is_pinned_without_a_gpu():
    assert pinning(None) == (None, None)
    assert pinning(torch.device("cpu")) == (None, None)


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu():
    data = homogeneous()
    plain = NeighborLoader(data, [4, 3], batch_size=32, generator=torch.Generator().manual_seed(1))
    loader = NeighborLoader(data, [4, 3], batch_size=32, generator=torch.Generator().manual_seed(1), device="cuda")
    for _ in range(3):
        for host, batch in zip(plain, loader, strict=True):
            assert batch.x.is_cuda
            assert batch.edge_index.is_cuda
            assert torch.equal(batch.x.cpu(), host.x)
            assert torch.equal(batch.edge_index.cpu(), host.edge_index)
            assert torch.equal(batch.input_id.cpu(), host.input_id)
