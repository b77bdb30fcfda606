"""Which dialects there are, and which one a chat template teaches."""

from __future__ import annotations

from typing import Literal

from inferloop.engine.text.tools.dialect import Dialect
from inferloop.engine.text.tools.json_calls import HERMES, LLAMA3_JSON
from inferloop.engine.text.tools.pythonic import PYTHONIC

DialectName = Literal["hermes", "llama3_json", "pythonic"]
DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (HERMES, LLAMA3_JSON, PYTHONIC)}


def taught_dialect(template: str) -> str | None:
    """Name of the dialect in which a chat template that knows tools asks for calls; None: in none of ours."""
    if "[TOOL_CALLS]" in template:  # Mistral's
        return None
    if "<tool_call>" in template:
        return None if "<function=" in template else "hermes"  # the latter is Qwen's XML inside the same tags
    if "[func_name1(" in template or "[func_name(" in template:
        return "pythonic"
    if '"parameters": ' in template and '{"name": ' in template:
        return "llama3_json"
    return None
