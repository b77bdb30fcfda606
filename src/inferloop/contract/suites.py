"""Where the suite that a contract names lies."""

from __future__ import annotations

from pathlib import Path

from inferloop.contract.source import FORMATS
from inferloop.core.errors import nearest


def search_roots(folder: Path) -> tuple[Path, ...]:
    """The contract's folder, its parent, and the current folder, each once."""
    roots = (folder.resolve(), folder.resolve().parent, Path.cwd())
    return tuple(dict.fromkeys(roots))


def resolve_suite(name: str, folder: Path) -> tuple[str, Path] | None:
    """(canonical name, file) of `evals/assistant.yaml` or the bare `assistant`; None when there is none.

    The canonical name is the path below the root it was found in, so it is the same on every machine.
    """
    for root in search_roots(folder):
        for candidate in _candidates(name):
            if (root / candidate).is_file():
                return candidate.as_posix(), (root / candidate).resolve()
    return None


def explain_missing(name: str, folder: Path) -> tuple[str, str]:
    """(problem, hint): where it was looked for, and the nearest suite that exists."""
    roots = search_roots(folder)
    places = ", ".join(str(root / _candidates(name)[-1]) for root in roots)
    known = sorted({p.stem for root in roots for p in (root / "evals").glob("*") if p.suffix in FORMATS})
    close = nearest(Path(name).stem, known)
    if close:
        hint = f"did you mean {close}?"
    else:
        hint = f"known suites: {', '.join(known)}" if known else "no suite was found in any evals/ folder there"
    return f"no suite is named {name!r}; looked for {places}", hint


def _candidates(name: str) -> list[Path]:
    path = Path(name)
    if path.suffix in FORMATS or len(path.parts) > 1:
        return [path]
    return [Path("evals") / f"{name}.yaml"]
