"""What the flags of `serve` mean to the engine."""

from typing import Any

import pytest
from typer.testing import CliRunner

from inferloop.cli import serve
from inferloop.cli.main import app


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [([], "bf16"), (["--deterministic"], "fp32"), (["--dtype", "fp32"], "fp32"), (["--dtype", "bf16"], "bf16")],
)
def test_deterministic_mode_chooses_the_precision_it_needs(
    flags: list[str], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(serve, "_run", lambda *args: seen.extend(args))
    result = CliRunner().invoke(app, ["serve", "m", *flags])
    assert result.exit_code == 0, result.output
    assert [value.dtype for value in seen if hasattr(value, "dtype")] == [dtype]
