"""Our engine with a real model, served as a process, answers as every backend must."""

from __future__ import annotations

import pytest

from inferloop.backends.conformance import CHECKS, Check, Target, run_check
from inferloop.backends.http import HttpClient
from inferloop.models.resolve import ModelFiles


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
async def test_embedded(check: Check, served_model: str, embedded_model: ModelFiles) -> None:
    client = HttpClient(served_model)
    result = await run_check(check, Target(client, embedded_model.model_id), timeout_s=600)
    await client.close()
    assert result.outcome == "passed", result.reason
