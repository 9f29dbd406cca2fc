"""bench models: the command under a table repeats what was run."""

import shlex

import pytest
from typer.testing import CliRunner

from benchmarks.suites import models
from stretto.cli import app


@pytest.mark.parametrize("ablation", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_the_command_repeats_the_run(ablation, train):
    first = models.run("gcn", "er:60:200", [4, 4, 3], train=train, repeats=2, ablation=ablation)
    words = shlex.split(first.command())
    assert ("--no-ablation" in words, "--eval" in words) == (not ablation, not train)
    again = CliRunner().invoke(app, words[1:])
    assert again.exit_code == 0, again.output
    # The same candidates, in any order, and the command itself once more.
    assert all(outcome.name in again.output for outcome in first.outcomes)
    assert ("our plans, torch kernels" in again.output) == ablation
    assert first.command() in again.output


@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_compiled_is_part_of_the_command(compiled):
    command = models.Result("gcn", "cora", [4, 3], True, compiled=compiled).command()
    assert ("--no-compile" in shlex.split(command)) == (not compiled)
