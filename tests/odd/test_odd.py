"""Odd inputs to every op, every layer and every way to make a graph: none kills the process, none gives another result
than stock. The whole table of layers is a slow test; `make test` takes a part of it, another of each layer."""

import pytest

from tests.odd.running import failures

pytestmark = pytest.mark.timeout(900)  # processes of their own, on a machine that may be busy
PART = 13  # every thirteenth case of the table of layers: some of each tensor of each layer


def check(module: str, least: int, *words: int) -> None:
    found, count = failures(module, words)
    assert not found, f"{len(found)} of {count} cases:\n" + "\n".join(found)
    assert count >= least, f"only {count} cases ran"


def test_ops_and_graphs():
    check("tests.odd.ops", 5000)


def test_layers():
    check("tests.odd.layers", 700, 0, PART)


def test_layers_with_any_options():
    check("tests.odd.layers", 300, 1, 300)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_layers_with_every_input():
    check("tests.odd.layers", 10000)
