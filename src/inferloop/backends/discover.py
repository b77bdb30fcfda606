"""Which engines are installed, and where: in this environment, in folders of environments, or where the user says.

Nothing is started and nothing of an engine is imported: a package's version stands in its metadata.
"""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

from inferloop.backends import llama_server, llamacpp, openvino, sglang, trtllm, vllm
from inferloop.backends.engine_kind import EngineKind, Installation
from inferloop.core.digest import file_digest
from inferloop.core.errors import EnvironmentLacksError, UsageError, nearest

ENGINES: dict[str, EngineKind] = {
    kind.name: kind for kind in (llamacpp.KIND, llama_server.KIND, vllm.KIND, openvino.KIND, sglang.KIND, trtllm.KIND)
}
PEERS = Path(".peers")
"""Where `make peers` puts environments."""


def parse_venvs(texts: Sequence[str]) -> dict[str, Path]:
    """`vllm=/path/of/venv` to its parts. Raises UsageError for an unknown engine or a path that is no environment."""
    found = {}
    for text in texts:
        name, equals, where = text.partition("=")
        path = Path(where).expanduser()
        if not equals or not where:
            raise UsageError(f"--venv {text!r}: say NAME=PATH, as in vllm=/opt/vllm")
        if name not in ENGINES:
            close = nearest(name, ENGINES)
            hint = f"did you mean {close!r}?" if close else f"known: {', '.join(ENGINES)}"
            raise UsageError(f"--venv {text}: unknown engine {name!r} ({hint})")
        if not _python(path).exists():
            raise UsageError(f"--venv {text}: {path} is no virtual environment: it has no bin/python")
        found[name] = path
    return found


def find(kind: EngineKind, venvs: Mapping[str, Path], peers: Path = PEERS) -> Installation | None:
    """The installation to use: of the environment that the user named and no other, else of this one, else of the
    first in `peers` that has it. One that lacks nothing goes first."""
    found = list(_installations(kind, venvs, peers))
    return next((here for here in found if not here.missing), found[0] if found else None)


def require(name: str, venvs: Mapping[str, Path], peers: Path = PEERS) -> Installation:
    """Raises EnvironmentLacksError, with the way to install it, when an engine is not here or not whole."""
    kind = ENGINES[name]
    here = find(kind, venvs, peers)
    if here is None:
        where = f"in {venvs[name]}" if name in venvs else f"in this environment or below {peers}"
        fix = f"{kind.install}; an environment elsewhere is named with --venv {name}=PATH."
        raise EnvironmentLacksError(f"{name} is not installed {where}", fix=fix)
    if here.missing:
        raise EnvironmentLacksError(
            f"{name} {here.version} in {here.where} lacks {', '.join(here.missing)}", fix=kind.install
        )
    return here


def _installations(kind: EngineKind, venvs: Mapping[str, Path], peers: Path) -> Iterator[Installation]:
    if kind.name in venvs:
        yield from _in_venv(kind, venvs[kind.name])
        return
    yield from _in(kind, Path(sysconfig.get_path("purelib")), Path(sys.executable), "this environment", here=True)
    for venv in sorted(peers.iterdir()) if peers.is_dir() else ():
        yield from _in_venv(kind, venv)
    program = shutil.which(kind.program) if kind.program else None
    if program is not None:
        path = Path(program).absolute()
        # a program tells its version only when it runs; its content is one as well
        yield Installation(kind.name, f"sha256:{file_digest(path)[:12]}", "", path, path.parent, str(path))


def _in_venv(kind: EngineKind, venv: Path) -> Iterator[Installation]:
    if _python(venv).exists():
        for packages in sorted(venv.glob("lib/python3*/site-packages")):
            yield from _in(kind, packages.absolute(), _python(venv).absolute(), str(venv))


def _in(kind: EngineKind, packages: Path, python: Path, where: str, *, here: bool = False) -> Iterator[Installation]:
    path = sys.path if here else [str(packages)]
    for name in kind.distributions:
        for distribution in distributions(name=name, path=path):
            missing = tuple(n for n in kind.server_needs if not any(True for _ in distributions(name=n, path=path)))
            # editable or in a parent environment: where it was found counts
            root = Path(str(distribution.locate_file(""))) if here else packages
            yield Installation(kind.name, distribution.version, name, python, root, where, missing)
            return


def _python(venv: Path) -> Path:
    return venv / "bin" / "python"


_SECRET = re.compile(r"api[-_]?key|secret|password|passwd|credential|hf[-_]token|auth[-_]token|access[-_]token", re.I)


def without_secrets(argv: Sequence[str]) -> list[str]:
    """A command line that may be written down: values of flags that hold secrets are replaced."""
    told: list[str] = []
    hide = False
    for word in argv:
        name, equals, _ = word.partition("=")
        is_secret = word.startswith("-") and bool(_SECRET.search(name))
        told.append("***" if hide and not word.startswith("--") else f"{name}=***" if is_secret and equals else word)
        hide = is_secret and not equals
    return told
