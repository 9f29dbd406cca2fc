"""Benchmarks tune; their choices must not land in the user's cache folder."""

import pytest


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
