"""What may stand after --target."""

from __future__ import annotations

import pytest

from inferloop.cli.wire import embedded_spec, is_url, tpot_objective_ms
from inferloop.contract.workload import ModelRef
from inferloop.core.errors import UsageError
from inferloop.core.slo import Objective, Slo


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://api.example.org/v1/", "http://[::1]:80"])
def test_urls(url: str) -> None:
    assert is_url(url)


@pytest.mark.parametrize("name", ["embedded", "localhost:8000", "", "ftp://x"])
def test_names(name: str) -> None:
    assert not is_url(name)


@pytest.mark.parametrize(
    "broken", ["http://", "http://h:port", "http://h:99999", "http://a b", "http://[::1", "https:///x"]
)
def test_half_a_url_is_told(broken: str) -> None:
    with pytest.raises(UsageError, match="not a complete URL"):
        is_url(broken)


def test_a_replica_is_told_the_tightest_time_per_token_of_the_contract() -> None:
    slo = Slo((Objective("ttft_ms", 0.95, 9.0), Objective("tpot_ms", 0.5, 30.0), Objective("tpot_ms", 0.95, 40.0)))
    assert tpot_objective_ms(slo) == 30.0
    assert tpot_objective_ms(Slo((Objective("ttft_ms", 0.95, 9.0),))) is None
    argv = embedded_spec(ModelRef("m"), None, tpot_objective_ms=tpot_objective_ms(slo)).argv
    assert argv[argv.index("--tpot-objective-ms") + 1] == "30.0"
    assert "--tpot-objective-ms" not in embedded_spec(ModelRef("m"), None, tpot_objective_ms=None).argv
