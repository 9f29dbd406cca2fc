"""`stretto tune`: settles choices on disk."""

import json

import pytest
from typer.testing import CliRunner

from stretto import cli
from stretto.errors import StrettoError
from stretto.kernels import native
from stretto.ops.pick import picker

runner = CliRunner()


@pytest.mark.skipif(native.library() is None, reason="no native kernels: nothing to choose from")
def test_settled_choices_are_kept_on_disk(tmp_path):
    picker.forget()
    result = runner.invoke(cli.app, ["tune", "--graph", "rmat:13:60000", "--width", "64"])
    assert result.exit_code == 0, result.output
    files = list((tmp_path / "cache").glob("kernels-*.json"))
    assert len(files) == 1
    assert json.loads(files[0].read_text())["choices"]
    picker.forget()


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [("width", "16,none", "numbers with commas"), ("dtype", "f128", "one of f32"), ("weight", "scales", "one of none")],
)
def test_wrong_options_are_named(option, value, wanted):
    result = runner.invoke(cli.app, ["tune", "--graph", "star:5", f"--{option}", value])
    assert isinstance(result.exception, StrettoError)
    assert f"'--{option}' is {value!r}, wanted {wanted}" in str(result.exception)
