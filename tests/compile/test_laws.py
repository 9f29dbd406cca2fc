"""Every law, exactly: both sides agree in integer arithmetic modulo a prime, where no rounding can hide anything."""

import numpy as np
import pytest

from stretto.compile.rules import LAWS

PRIME = 10_007


def _parse(text, values):
    """Evaluate a law's side: juxtaposition multiplies, ' transposes, ^2 squares, + adds, c is a number."""
    tokens = (
        text.replace("(", " ( ")
        .replace(")", " ) ")
        .replace("'", " ' ")
        .replace("+", " + ")
        .replace("^2", " ^2 ")
        .split()
    )
    place = 0

    def total():
        nonlocal place
        value = product()
        while place < len(tokens) and tokens[place] == "+":
            place += 1
            value = (value + product()) % PRIME
        return value

    def product():
        nonlocal place
        value = factor()
        while place < len(tokens) and tokens[place] not in ("+", ")"):
            other = factor()
            scalar = np.ndim(value) == 0 or np.ndim(other) == 0
            value = (value * other if scalar else value @ other) % PRIME
        return value

    def factor():
        nonlocal place
        token = tokens[place]
        place += 1
        if token == "(":
            value = total()
            place += 1
        else:
            value = values[token]
        while place < len(tokens) and tokens[place] in ("'", "^2"):
            value = value.T if tokens[place] == "'" else (value @ value) % PRIME
            place += 1
        return value

    result = total()
    assert place == len(tokens), f"could not read {text!r} past {tokens[place:]}"
    return result


@pytest.mark.parametrize("law", LAWS)
def test_both_sides_are_equal(law):
    rng = np.random.default_rng(0)
    for size in (1, 3, 8):
        sides = {name: rng.integers(0, PRIME, (size, size), dtype=np.int64) for name in "AXYZWV"}
        sides["A"] *= rng.random((size, size)) < 0.4
        sides |= {name: np.diag(rng.integers(0, PRIME, size, dtype=np.int64)) for name in "ST"}
        values = {**sides, "c": np.int64(rng.integers(1, PRIME))}
        left, right = (_parse(side, values) for side in (LAWS[law].left, LAWS[law].right))
        assert np.array_equal(left, right), law


def test_a_wrong_law_is_noticed():
    rng = np.random.default_rng(1)
    values = {name: rng.integers(0, PRIME, (4, 4), dtype=np.int64) for name in "AX"}
    assert not np.array_equal(_parse("A X", values), _parse("X A", values))
