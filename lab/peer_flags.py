"""Whether engines that nobody can run here take the flags that are made for them, by their own sources.

    pip download --no-deps sglang==0.5.23 -d /tmp/sglang && unzip -q -d /tmp/sglang/src /tmp/sglang/*.whl
    python -m lab.peer_flags sglang /tmp/sglang/src
    python -m lab.peer_flags trtllm CHECKOUT_OF_TENSORRT_LLM

SGLang's own argument parser reads them, in a process of its own: packages that it imports and that are not here are
replaced by empty ones, which the parser does not use. TensorRT-LLM cannot be imported without its libraries: the
options of `trtllm-serve serve` are read from its sources, names and types. Neither says that the engine works.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

from inferloop.backends import sglang, trtllm
from inferloop.backends.engine_kind import EngineKind, Installation, ReplicaOptions
from inferloop.cli import wire
from inferloop.models.resolve import ModelFiles, resolve

_STUBBED = ("orjson", "pybase64", "triton", "zmq", "IPython", "aiohttp")
_PARSE = f"""
import argparse, importlib.abc, importlib.machinery, sys, types
from unittest.mock import MagicMock

class Empty(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {_STUBBED!r}:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Empty(spec.name)
    def exec_module(self, module):
        pass

sys.path.insert(0, sys.argv[1])
sys.meta_path.append(Finder())
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
parser.parse_args(sys.argv[2:])
print(len(parser._actions))
"""


def variants(kind: EngineKind, files: ModelFiles) -> list[tuple[str, ...]]:
    """Flags of its server for options that together set all of them."""
    here = Installation(kind.name, "0", kind.distributions[0], Path("python"), Path(), "")
    common = {"context_length": 512, "max_num_seqs": 8, "memory_share": 0.5, "tensor_parallel": 2}
    asked = [ReplicaOptions("model", files), ReplicaOptions("model", files, **common)]  # type: ignore[arg-type]
    if kind is sglang.KIND:
        asked += [
            ReplicaOptions("model", files, weights=weights, kv="fp8", seed=1, prefix_cache=False)
            for weights in ("bf16", "fp16", "fp32", "fp8")
        ]
        asked.append(ReplicaOptions("model", files, kv="bf16"))
    return [tuple(word.replace("{port}", "1") for word in kind.launch(here, options).argv) for options in asked]


def check_sglang(sources: Path, files: ModelFiles) -> str:
    for argv in variants(sglang.KIND, files):
        done = subprocess.run(
            [sys.executable, "-c", _PARSE, str(sources), *argv[3:]], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(argv)}\n{done.stderr[-2000:]}")
    return f"its parser, of {done.stdout.strip()} options, takes them"


def check_trtllm(sources: Path, files: ModelFiles) -> str:
    options = trtllm_options((sources / "tensorrt_llm" / "commands" / "serve.py").read_text())
    for argv in variants(trtllm.KIND, files):
        words = iter(argv[5:])
        for word in words:
            if word not in options:
                raise SystemExit(f"{word} is none of its options: {', '.join(sorted(options))}")
            kind = options[word]
            if kind != "flag":
                {"int": int, "float": float}.get(kind, str)(next(words))
    return f"its sources, of {len(options)} options, have them, with these types"


def trtllm_options(source: str) -> dict[str, str]:
    """Names of the options of `serve`, and int, float, flag or another name of a type."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or not _is_serve(node):
            continue
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "click.option":
                keywords = {k.arg: ast.unparse(k.value) for k in call.keywords}
                kind = "flag" if keywords.get("is_flag") == "True" else keywords.get("type", "str")
                names = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                found |= {name: kind for name in names if name.startswith("--")}
    return found


def _is_serve(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(d).replace('"', "'").startswith("click.command('serve'") for d in function.decorator_list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("sglang", "trtllm"))
    parser.add_argument("sources", type=Path, help="an unpacked wheel, or a checkout")
    parser.add_argument("--model", default=wire.EMBEDDED_MODEL)
    o = parser.parse_args()
    check = {"sglang": check_sglang, "trtllm": check_trtllm}[o.engine]
    print(f"{o.engine}: {check(o.sources.absolute(), resolve(o.model))}")


if __name__ == "__main__":
    main()
