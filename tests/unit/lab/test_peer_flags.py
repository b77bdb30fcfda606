"""Reading the options of a command from its sources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from lab.peer_flags import check_trtllm, trtllm_options

from inferloop.models.resolve import open_files

SOURCE = """
import click
from nowhere import Hint

@click.command("serve")
@click.argument("model", type=str)
@click.option("--host", type=str, default="x")
@click.option("--port", type=int, default=Hint.port)
@click.option("--backend", type=Hint(["pytorch"]))
@click.option("--long_name", "--tp_size", "destination", type=int)
@click.option('--trust', is_flag=True)
MORE
def serve(model, host):
    pass

@click.command("other")
@click.option("--elsewhere", type=int)
def other():
    pass
"""


def test_options_of_serve_alone_with_their_types() -> None:
    assert trtllm_options(SOURCE.replace("MORE", "@click.option('--f', type=float)")) == {
        "--host": "str",
        "--port": "int",
        "--backend": "Hint(['pytorch'])",
        "--long_name": "int",
        "--tp_size": "int",
        "--trust": "flag",
        "--f": "float",
    }


def test_a_flag_that_is_none_is_named(tmp_path: Path, tiny_gguf: Callable[..., Path]) -> None:
    commands = tmp_path / "tensorrt_llm" / "commands"
    commands.mkdir(parents=True)
    files = open_files("tiny", tiny_gguf())
    (commands / "serve.py").write_text(SOURCE.replace("MORE", "@click.option('--max_seq_len', type=int)"))
    with pytest.raises(SystemExit, match="--max_batch_size is none of its options"):
        check_trtllm(tmp_path, files)
    more = "@click.option('--max_seq_len', '--max_batch_size', type=int)\n"
    more += "@click.option('--free_gpu_memory_fraction', type=float)"
    (commands / "serve.py").write_text(SOURCE.replace("MORE", more))
    assert check_trtllm(tmp_path, files) == "its sources, of 9 options, have them, with these types"
