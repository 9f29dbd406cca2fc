"""Accelerated models inside DDP and fully_shard, in real processes: every door, before and after torch has wrapped."""

from stretto.dist import launch
from tests.dist.wrapped import run


def test_wrapped_models_are_fast_and_others_are_left_alone():
    assert launch(run, 2, ("DDP", "layers", "whole"), limit=400) == [[], []]
