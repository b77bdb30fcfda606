from __future__ import annotations

import pytest

from inferloop.core import errors


def test_exit_codes_are_the_documented_ones() -> None:
    assert errors.ContractError("x").exit_code == 2
    assert errors.ModelFileError("x").exit_code == 3
    assert errors.RunVoidError("x").exit_code == 4
    assert errors.EngineError("x").exit_code == 1


def test_a_contract_error_names_file_line_key_problem_and_hint() -> None:
    error = errors.ContractError("unknown key", file="a.yaml", line=7, key="slo.tftt_ms", hint="did you mean ttft_ms?")
    assert str(error) == "a.yaml:7: slo.tftt_ms: unknown key (did you mean ttft_ms?)"


@pytest.mark.parametrize(("typo", "right"), [("tftt_ms", "ttft_ms"), ("zzz", None)])
def test_nearest_suggests_only_what_is_close(typo: str, right: str | None) -> None:
    assert errors.nearest(typo, ["ttft_ms", "tpot_ms", "error_rate"]) == right
