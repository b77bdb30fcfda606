"""The options of `inferloop serve` about low-rank adapters, named as vLLM names them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from inferloop.core.errors import UsageError

EnableOption = Annotated[
    bool, typer.Option("--enable-lora", help="Take low-rank adapters (PEFT directories), several at once in one batch.")
]
ModulesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lora-modules",
        help='NAME=PATH of an adapter, or {"name": ..., "path": ...}; may be repeated. Requests name it as model.',
        show_default=False,
    ),
]
MaxOption = Annotated[int, typer.Option("--max-loras", min=1, max=1024, help="Most adapters loaded at a time.")]
RankOption = Annotated[
    int, typer.Option("--max-lora-rank", min=1, max=512, help="Largest rank that an adapter may have.")
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--lora-dir",
        help="Let /v1/load_lora_adapter load what lies below this folder, and unload; without it neither works.",
    ),
]


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """As `NativeOptions` takes them; `folder` as ServeConfig does."""

    num: int
    max_rank: int
    modules: tuple[tuple[str, Path], ...]
    folder: Path | None


def adapter_options(
    enabled: bool, modules: list[str] | None, num: int, max_rank: int, folder: Path | None, *, served_name: str
) -> AdapterOptions:
    """Raises UsageError for options that need --enable-lora, cannot be read, or contradict each other."""
    if not enabled:
        if modules or folder is not None:
            raise UsageError("--lora-modules and --lora-dir need --enable-lora")
        return AdapterOptions(0, max_rank, (), None)
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--lora-dir {folder}: is no folder")
    pairs = [_module(text, served_name) for text in modules or ()]
    if twice := next((name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i])), None):
        raise UsageError(f"--lora-modules: {twice!r} is given twice")
    if len(pairs) > num:
        raise UsageError(f"--lora-modules names {len(pairs)} adapters, --max-loras allows {num}")
    return AdapterOptions(num, max_rank, tuple(pairs), folder)


def _module(text: str, served_name: str) -> tuple[str, Path]:
    if not text.startswith("{"):
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise UsageError(f"--lora-modules {text}: must be NAME=PATH")
        return name, Path(path)
    try:
        value = json.loads(text)
    except ValueError as problem:
        raise UsageError(f"--lora-modules {text}: is no JSON: {problem}") from None
    if unknown := next((key for key in value if key not in ("name", "path", "base_model_name")), None):
        raise UsageError(f"--lora-modules {text}: unknown key {unknown!r}")
    name, path = value.get("name"), value.get("path")
    if not (isinstance(name, str) and name and isinstance(path, str) and path):
        raise UsageError(f"--lora-modules {text}: needs name and path")
    if value.get("base_model_name") not in (None, served_name):
        raise UsageError(f"--lora-modules {text}: this server's model is {served_name!r}")
    return name, Path(path)
