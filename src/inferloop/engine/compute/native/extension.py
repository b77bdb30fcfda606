"""The extension, when it is there and of these sources."""

from __future__ import annotations

import importlib
from typing import Any

from inferloop.core.errors import EnvironmentLacksError
from inferloop.engine.compute.native.revisions import REVISIONS


def load_extension() -> Any:
    """The module `_native`. Raises EnvironmentLacksError when it was not built, does not load, or was built from other
    sources than these."""
    try:
        native = importlib.import_module("inferloop.engine.compute.native._native")
    except ImportError as error:
        fix = "Install inferloop again where there are a C++20 compiler and Python's headers, or use --compute torch."
        raise EnvironmentLacksError(f"the native extension is not built or does not load ({error})", fix=fix) from None
    built = getattr(native, "revisions", "older")
    if built != REVISIONS:
        raise EnvironmentLacksError(
            f"the native extension was built from other sources than these (revisions {built}, not {REVISIONS})",
            fix="Install inferloop again (in a checkout scripts/build-native is enough), or use --compute torch.",
        )
    return native
