"""Choices on disk: corrupt and foreign files are ignored aloud, concurrent writers lose nothing."""

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time

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


def test_a_flipped_file_is_ignored_aloud(said):
    """Any byte of it, also one that leaves JSON, but of another number or name."""
    store.add("kernels", FACTS, {"one": {"variant": "x", "ms": 1.25}, "two": {"variant": "y", "ms": 0.5}})
    file = store.path("kernels", FACTS)
    whole = file.read_bytes()
    for at in range(0, len(whole), 3):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        found = store.read("kernels", FACTS)
        assert found == {} or json.loads(file.read_bytes()) == json.loads(whole), at  # a blank may become another
    file.write_text("[" * 100_000)
    assert store.read("kernels", FACTS) == {}
    assert str(file) in said()[-1]


def everything_beside(file):
    return sorted(path.name for path in file.parent.iterdir())


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(said):
    """What cannot be told as JSON, and a disk that is full (here: a limit on the size of files)."""
    store.add("kernels", FACTS, {"one": {}})
    file = store.path("kernels", FACTS)
    with pytest.raises(TypeError):
        store.add("kernels", FACTS, {"two": object()})
    assert everything_beside(file) == [file.name]
    resource = pytest.importorskip("resource")
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        store.add("kernels", FACTS, {"three": {"variant": "x" * 1000}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "not kept" in said()[-1]
    assert everything_beside(file) == [file.name]
    assert store.read("kernels", FACTS) == {"one": {}}


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="links are told apart by O_NOFOLLOW")
def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path, said):
    file = store.path("kernels", FACTS)
    file.parent.mkdir(parents=True)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (f"{file.name}.tmp", f"{file.stem}.lock"):
        (file.parent / name).symlink_to(victim)
    store.add("kernels", FACTS, {"one": {}})
    assert "not kept" in said()[-1]
    assert victim.read_text() == "precious"
    assert not file.exists()


HOLD = """
import sys, time
from pathlib import Path
from stretto import files
with files.replacing(Path(sys.argv[1])) as out:
    out.write(b"half of it")
    out.flush()
    print("holding", flush=True)
    time.sleep(60)
"""


def test_who_holds_the_file_is_waited_for_a_second_and_if_killed_written_over(said):
    file = store.path("kernels", FACTS)
    file.parent.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(file)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"holding\n"
        start = time.monotonic()
        store.add("kernels", FACTS, {"one": {}})
        assert 0.9 < time.monotonic() - start < 3
        assert "another process writes" in said()[-1]
        holder.kill()
    assert everything_beside(file) == [f"{file.name}.tmp"]
    store.add("kernels", FACTS, {"one": {}})
    assert store.read("kernels", FACTS) == {"one": {}}
    assert everything_beside(file) == [file.name]


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
