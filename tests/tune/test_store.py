"""Choices on disk: corrupt and foreign files are ignored aloud, concurrent writers lose nothing."""

import json
import logging
import multiprocessing
import os

import pytest

from stretto import settings
from stretto.machine import facts as machine
from stretto.machine import store

FACTS = {"cpu": "a cpu", "isa": "avx2", "threads": 2, "torch": "9", "stretto": "1"}


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, logger="stretto")
    return lambda: [r.getMessage() for r in caplog.records]


def test_round_trip():
    assert store.read("kernels", FACTS) == {}
    store.add("kernels", FACTS, {"one": {"variant": "x"}})
    store.add("kernels", FACTS, {"two": {"variant": "y"}})
    assert store.read("kernels", FACTS) == {"one": {"variant": "x"}, "two": {"variant": "y"}}
    assert store.read("plans", FACTS) == {}
    assert store.read("kernels", {**FACTS, "threads": 4}) == {}
    assert not list(settings.cache_folder().glob("*.tmp"))


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '"text"', "{}", '{"format": 1}', '{"format": 1, "machine": {}}', "\x00\xff"],
    ids=["empty", "cut off", "list", "null", "text", "no keys", "no machine", "no choices", "binary"],
)
def test_a_corrupt_file_is_ignored_aloud_and_replaced(content, said):
    file = store.path("kernels", FACTS)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert store.read("kernels", FACTS) == {}
    assert len(said()) == 1
    assert "ignored" in said()[0]
    assert str(file) in said()[0]
    store.add("kernels", FACTS, {"one": {}})
    assert store.read("kernels", FACTS) == {"one": {}}


def test_choices_that_are_no_table_are_ignored(said):
    file = store.path("kernels", FACTS)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"format": store.FORMAT, "machine": FACTS, "choices": ["one"]}))
    assert store.read("kernels", FACTS) == {}
    assert len(said()) == 1


def test_a_file_of_another_machine_or_format_is_ignored_aloud(said):
    file = store.path("kernels", FACTS)
    file.parent.mkdir(parents=True)
    for other in ({"machine": {**FACTS, "cpu": "another"}}, {"format": 99}):
        file.write_text(json.dumps({"format": store.FORMAT, "machine": FACTS, "choices": {"one": {}}, **other}))
        assert store.read("kernels", FACTS) == {}
    assert len(said()) == 2
    assert all("another machine or version" in line for line in said())


def test_a_folder_that_cannot_be_written_is_said_and_not_fatal(monkeypatch, tmp_path, said):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "file"))
    store.add("kernels", FACTS, {"one": {}})
    assert "tuning results are not kept" in said()[0]


def _write(name: str) -> None:
    for i in range(40):
        store.add("kernels", FACTS, {f"{name}-{i}": {"variant": "x"}})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_writing_at_once_lose_nothing():
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(name,)) for name in "abc"]
    for writer in writers:
        writer.start()
    _write("d")
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert set(store.read("kernels", FACTS)) == {f"{name}-{i}" for name in "abcd" for i in range(40)}


def test_the_machine_is_told_apart():
    facts = machine.describe()
    assert {"cpu", "isa", "threads", "torch", "stretto"} <= set(facts)
    assert machine.key(facts) == machine.key(dict(reversed(facts.items())))
    for name in facts:
        assert machine.key({**facts, name: "other"}) != machine.key(facts)
