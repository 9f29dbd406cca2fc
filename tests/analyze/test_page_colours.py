"""Colours of the pages: seen on their ground, and told apart by readers who see red, green or blue otherwise."""

import itertools
import re

import pytest
import torch

from stretto.page.frame import STYLE

LIGHT, DARK = (dict(re.findall(r"--(\w+):(#[0-9a-f]+)", line)) for line in STYLE.splitlines()[:2])
TEXT, DRAWN = 4.5, 3.0  # WCAG 2 AA: contrast of text, and of what is drawn
BOUNDS = ("c1", "c2", "c3", "c4", "c5")  # stand side by side in one picture
APART = 14.0  # of CIE Lab, where 2.3 can just be seen side by side
# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SEEN = {
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = torch.tensor([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour):
    """#rrggbb or #rgb as linear RGB."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    v = torch.tensor([int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)])
    return torch.where(v <= 0.04045, v / 12.92, ((v + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    dark, light = sorted(float(XYZ[1] @ linear(c)) + 0.05 for c in (a, b))
    return light / dark


def lab(rgb):
    t = XYZ @ rgb / torch.tensor([0.9505, 1.0, 1.089])
    x, y, z = torch.where(t > 0.008856, t ** (1 / 3), 7.787 * t + 16 / 116)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("scheme", [LIGHT, {**LIGHT, **DARK}], ids=["light", "dark"])
def test_colours_stand_out(scheme):
    for ground in ("bg", "card"):
        assert min(contrast(scheme[c], scheme[ground]) for c in ("fg", "dim")) >= TEXT
        drawn = {c: contrast(scheme[c], scheme[ground]) for c in scheme if re.fullmatch(r"c\d|accent", c)}
        assert min(drawn.values()) >= DRAWN, drawn


@pytest.mark.parametrize("scheme", [LIGHT, {**LIGHT, **DARK}], ids=["light", "dark"])
@pytest.mark.parametrize("eyes", SEEN)
def test_bounds_are_told_apart(scheme, eyes):
    seen = {c: lab((torch.tensor(SEEN[eyes]) @ linear(scheme[c])).clamp(0, 1)) for c in BOUNDS}
    apart = {(a, b): float((seen[a] - seen[b]).norm()) for a, b in itertools.combinations(BOUNDS, 2)}
    assert min(apart.values()) >= APART, apart
