"""The picker: memory, then disk, then measuring inside the user's own calls; defaults, drops, failures, threads."""

import json
import time

import pytest
import torch

from stretto import Graph, ops
from stretto.machine import facts as machine
from stretto.machine import store
from stretto.ops.pick import MARGIN, TRIES, WARM, Picker, picker
from stretto.ops.variants import VARIANTS, Variant, legal
from tests.graphs import random_edges

A, B, C = Variant("a"), Variant("b"), Variant("c")


class Clock:
    """A clock that calls move: each variant takes the time it is said to take."""

    def __init__(self, monkeypatch, **seconds: float) -> None:
        self.now, self.seconds, self.calls = 0.0, seconds, []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def __call__(self, variant: Variant) -> str:
        self.calls.append(variant.name)
        self.now += self.seconds[variant.name]
        return variant.name


def settle(chooser, clock, key="key", variants=(A, B, C), most=60) -> str | None:
    for _ in range(most):
        chooser.run(key, variants, clock)
        if chooser.decided(key) is not None:
            return chooser.decided(key).name
    return None


def test_the_fastest_wins_and_slow_ones_are_dropped(monkeypatch):
    clock, chooser = Clock(monkeypatch, a=0.0009, b=0.0005, c=0.009), Picker()
    assert settle(chooser, clock) == "b"
    assert clock.calls[:WARM] == ["a"] * WARM  # the first calls warm up, untimed, with the default
    assert clock.calls.count("c") == 1
    assert clock.calls.count("a") == WARM + 2  # a second timing must say so where the first is not twice the best
    assert clock.calls.count("b") == TRIES
    clock.calls.clear()
    assert chooser.run("key", (A, B, C), clock) == "b"
    assert clock.calls == ["b"]


def test_the_default_keeps_its_place_unless_beaten_by_a_margin(monkeypatch):
    clock = Clock(monkeypatch, a=1.0, b=MARGIN + 0.01, c=1.0)
    assert settle(Picker(), clock) == "a"


def test_trying_is_bounded(monkeypatch):
    """Calls that take long are tried once each, not TRIES times."""
    clock = Clock(monkeypatch, a=1.0, b=1.1, c=0.9)
    assert settle(Picker(), clock) == "c"
    assert len(clock.calls) == WARM + 3


def test_choices_come_back_from_disk(monkeypatch):
    clock = Clock(monkeypatch, a=1.0, b=0.5, c=9.0)
    assert settle(Picker(), clock) == "b"
    clock.calls.clear()
    other = Picker()  # another process
    assert other.run("key", (A, B, C), clock) == "b"
    assert clock.calls == ["b"]
    assert other.run("unknown", (A, B, C), clock) == "a"


def test_a_choice_that_is_not_legal_any_more_is_measured_again(monkeypatch):
    clock = Clock(monkeypatch, a=1.0, b=0.5, c=0.1)
    assert settle(Picker(), clock) == "c"
    other = Picker()
    assert other.run("key", (A, B), clock) == "a"
    assert settle(other, clock, variants=(A, B)) == "b"


def test_tuning_off_takes_the_default(monkeypatch):
    monkeypatch.setenv("STRETTO_TUNE", "off")
    clock, chooser = Clock(monkeypatch, a=1.0, b=0.5, c=0.5), Picker()
    assert settle(chooser, clock) is None
    assert set(clock.calls) == {"a"}
    assert not store.path("kernels", machine.describe()).exists()


def test_deterministic_mode_takes_the_default_whatever_was_measured(monkeypatch):
    clock, chooser = Clock(monkeypatch, a=1.0, b=0.5, c=0.5), Picker()
    settle(chooser, clock)
    torch.use_deterministic_algorithms(True)
    try:
        assert chooser.run("key", (A, B, C), clock) == "a"
        assert chooser.run("other", (A, B, C), clock) == "a"
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_single_variant_is_not_measured(monkeypatch):
    chooser = Picker()
    assert settle(chooser, Clock(monkeypatch, a=1.0), variants=(A,), most=10) is None


def test_a_variant_that_fails_is_left_out(monkeypatch):
    clock = Clock(monkeypatch, a=1.0, b=0.5, c=0.1)

    def call(variant):
        if variant is C:
            raise RuntimeError("torch was built without it")
        return clock(variant)

    assert settle(Picker(), call) == "b"
    with pytest.raises(RuntimeError, match="no default"):
        Picker().run("key", (A, B), lambda variant: (_ for _ in ()).throw(RuntimeError("no default")))


def test_choices_belong_to_a_number_of_threads(monkeypatch):
    clock, chooser = Clock(monkeypatch, a=1.0, b=0.5, c=9.0), Picker()
    torch.set_num_threads(2)
    assert settle(chooser, clock) == "b"
    torch.set_num_threads(1)
    clock.seconds = {"a": 0.1, "b": 0.5, "c": 0.5}
    assert settle(chooser, clock) == "a"
    torch.set_num_threads(2)
    assert chooser.run("key", (A, B, C), clock) == "b"


def test_what_is_legal():
    assert legal("spmm", "cpu", width=16, plain=True)[0] is VARIANTS["spmm"]["cpu"][0]
    names = [v.name for v in legal("spmm", "cpu", width=16, plain=False)]
    assert "torch" not in names
    assert not any(name.startswith("tile") for name in names)
    assert "tile64_ahead8" in [v.name for v in legal("spmm", "cpu", width=128, plain=True)]
    assert legal("sddmm", "cpu", width=16, plain=True) == ()


@pytest.mark.usefixtures("needs_native")
def test_spmm_tunes_itself_in_real_calls():
    """A graph large enough to matter: after some steps the choice stands, in memory and on disk."""
    graph = Graph.of(random_edges(2000, 2000, 30_000), 2000)
    x = torch.randn(2000, 64)
    for _ in range(40):
        ops.spmm(graph, x)
    file = store.path("kernels", machine.describe())
    kept = json.loads(file.read_text())["choices"]
    assert len(kept) == 1
    (key,) = kept
    assert key.startswith("('spmm'")
    assert kept[key]["variant"] in {v.name for v in VARIANTS["spmm"]["cpu"]}
    picker.forget()
    ops.spmm(graph, x)
    assert len(picker._decided) == 1


@pytest.mark.usefixtures("needs_native")
def test_small_calls_are_not_tuned():
    graph = Graph.of(random_edges(100, 100, 500), 100)
    for _ in range(40):
        ops.spmm(graph, torch.randn(100, 16))
    assert not store.path("kernels", machine.describe()).exists()
