"""Which replicas may use each other's computed prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inferloop.backends.native_load import open_store
from inferloop.backends.native_options import NativeOptions
from inferloop.core.clock import RealClock
from inferloop.core.errors import UsageError
from inferloop.engine.compute.echo import EchoRunner
from inferloop.models.identity import ServingIdentity

IDENTITY = ServingIdentity("m", "weights", "q8_0 in bf16", "inferloop-echo", "1+1", "tokenizer", "template")
INFO = EchoRunner().info
OPTIONS = NativeOptions(prefix_memory_mib=1)


def root(identity: ServingIdentity = IDENTITY, layout: str = INFO.block_layout) -> bytes:
    store = open_store(identity, replace(INFO, block_layout=layout), OPTIONS, RealClock())
    assert store is not None
    return store.root


def test_whatever_decides_keys_and_values_keeps_blocks_apart() -> None:
    others = [
        root(replace(IDENTITY, weights_digest="other weights")),
        root(replace(IDENTITY, precision="q4_0 in bf16")),
        root(replace(IDENTITY, engine="inferloop-torch")),
        root(replace(IDENTITY, engine_revision="2+1")),
        root(replace(IDENTITY, adapter_digest="adapter")),
        root(layout="another"),
    ]
    assert len({root(), *others}) == 7


def test_what_only_decides_answers_does_not() -> None:
    same = replace(IDENTITY, model_id="n", template_digest="other", stop_token_ids=(3,), config={"max_sequences": 4})
    assert root(same) == root()


def test_there_is_a_store_only_when_it_is_asked_for(tmp_path: Path) -> None:
    assert open_store(IDENTITY, INFO, NativeOptions(), RealClock()) is None
    with pytest.raises(UsageError, match="turned off"):
        open_store(IDENTITY, INFO, replace(OPTIONS, share_prefixes=False), RealClock())
    with pytest.raises(UsageError, match="the echo runner"):
        open_store(IDENTITY, replace(INFO, block_bytes=0), OPTIONS, RealClock())
    store = open_store(IDENTITY, INFO, NativeOptions(prefix_folder=tmp_path / "new" / "folder"), RealClock())
    assert store is not None
    store.close()
    assert (tmp_path / "new" / "folder").is_dir()
