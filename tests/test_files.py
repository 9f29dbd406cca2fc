"""Files that are replaced in one step: whole at every moment, whoever is killed; nothing is left beside them."""

import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest

from stretto import files


def _replace_for_ever(path: Path, begun) -> None:
    number = 0
    while True:
        with files.replacing(path) as out:
            for _ in range(20):
                out.write(b"%09d" % number)
        begun.set()
        number += 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_file_is_whole_whenever_its_writer_is_killed(tmp_path):
    file, wait = tmp_path / "file", random.Random(1)
    context = multiprocessing.get_context("fork")
    for _ in range(20):
        begun = context.Event()
        writer = context.Process(target=_replace_for_ever, args=(file, begun))
        writer.start()
        assert begun.wait(60)
        time.sleep(wait.random() / 50)
        writer.kill()
        writer.join()
        content = file.read_bytes()
        assert content == content[:9] * 20
        assert {path.name for path in tmp_path.iterdir()} <= {"file", "file.tmp"}


def _replace(path: Path, error: type[BaseException] | None = None) -> None:
    with files.replacing(path) as out:
        out.write(b"new")
        if error is not None:
            raise error


def test_what_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"old")
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            _replace(file, error)
        assert file.read_bytes() == b"old"
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        _replace(tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_whether_a_file_can_be_written_is_known_before(tmp_path):
    file = tmp_path / "file"
    files.expect_writable(file)
    assert not list(tmp_path.iterdir())
    file.write_bytes(b"old")
    files.expect_writable(file)
    assert file.read_bytes() == b"old"
    for path in (tmp_path, tmp_path / "nowhere" / "file", file / "file"):
        with pytest.raises(OSError, match=path.name):
            files.expect_writable(path)


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="links are told apart by O_NOFOLLOW")
def test_no_link_is_followed(tmp_path):
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "file.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match=r"file\.tmp"):
        _replace(tmp_path / "file")
    with pytest.raises(OSError, match=r"file\.tmp"):
        files.expect_writable(tmp_path / "file")
    assert (tmp_path / "victim").read_bytes() == b"precious"
