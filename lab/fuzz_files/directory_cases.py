"""Hugging Face directories with something wrong in one of their files, or between them."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

from lab.fuzz_files.numbers import damaged_bytes, damaged_json
from lab.fuzz_files.samples import TEMPLATE

Files = dict[str, bytes]
_LOOPS = "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}{% endfor %}"
TEMPLATES = (
    _LOOPS + "{% endfor %}{% endfor %}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ [0] * 10**10 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ 7 ** 99999999 }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ 'a' | center(10**10) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ 'a' | indent(10**10, true) }}",
    "{{ [1] | batch(10**10, 0) | list }}",
    "{{ lipsum(n=10**9) }}",
    "{{ [1] | slice(10**9) | list }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ self._TemplateReference__context }}",
    "{{ raise_exception(1) }}",
    "{{ strftime_now('%' * 5000) }}",
    "{{ strftime_now('\x00') }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ 'a' | replace('', 'b' * 1000) | replace('', 'b' * 1000) | replace('', 'b' * 1000) | replace('', 'c' * 999) }}",
    "{% set x %}" + "{{ 1 }}" * 50 + "{% endset %}{{ x }}",
    "{{ " + "(" * 400 + "1" + ")" * 400 + " }}",
    "{{ [" * 200,
    "{% if true %}" * 300 + "{% endif %}" * 300,
    "{{ messages[0].content.encode('utf-16').decode('utf-8') }}",
    "{{ none + 1 }}{{ undefined.x.y }}",
    "{{ '\ud800' }}",
)
_PIECES = ("{{", "}}", "{%", "%}", " for ", " in ", " if ", "endfor", "endif", "messages", "|", "(", ")", "[", "]", "~")


def case(rng: random.Random, samples: list[Files]) -> Files:
    files = dict(rng.choice(samples))
    for _ in range(rng.choice((1, 1, 1, 2))):
        name = rng.choice([name for name in files for _ in range(4 if name.endswith(".safetensors") else 1)] or [""])
        fate = rng.random()
        if not name or fate < 0.02:
            files.pop(name, None)
        elif name.endswith(".safetensors"):
            files[name] = damaged_weights(rng, files[name])
        elif fate < 0.2:
            files[name] = damaged_bytes(rng, files[name], 2048)
        elif name.endswith(".jinja"):
            files[name] = _template(rng).encode("utf-8", "surrogatepass")
        elif fate < 0.4 and name == "tokenizer_config.json":
            files[name] = json.dumps({"chat_template": _template(rng)}).encode()
        else:
            files[name] = _json(rng, files[name])
    return files


def _json(rng: random.Random, data: bytes) -> bytes:
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError):
        return damaged_bytes(rng, data, 2048)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = damaged_json(rng, value)
    return json.dumps(value).encode()


def _template(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(TEMPLATES)
    text = TEMPLATE
    for _ in range(rng.choice((1, 2, 4))):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(_PIECES) + text[at + rng.choice((0, 1, 5)) :]
    return text


def damaged_weights(rng: random.Random, data: bytes) -> bytes:
    if len(data) < 8 or rng.random() < 0.25:
        return damaged_bytes(rng, data, 4096)
    length = struct.unpack("<Q", data[:8])[0]
    try:
        header: Any = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        return damaged_bytes(rng, data, 4096)
    fate = rng.random()
    if fate < 0.8:
        for _ in range(rng.choice((1, 1, 2))):
            header = damaged_json(rng, header)
        text = json.dumps(header)
        if fate < 0.05 and isinstance(header, dict) and header:  # a name twice
            name = rng.choice(list(header))
            text = "{" + json.dumps(name) + ": " + json.dumps(header[name]) + ", " + text[1:]
    elif fate < 0.9:  # many tensors of nothing, or lists in lists
        num = rng.choice((100, 3000))
        if rng.random() < 0.5 and isinstance(header, dict):
            header |= {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(num)}
            text = json.dumps(header)
        else:
            text = '{"__metadata__": ' + rng.choice(("[", "[[],", '{"a":')) * num
    else:
        text = json.dumps(header) + " " * rng.choice((0, 1, 7, 5000))
    told = len(text) if rng.random() < 0.85 else rng.choice((0, 1, 2, len(data), 1 << 31, 1 << 62, (1 << 64) - 1))
    return struct.pack("<Q", told) + text.encode() + data[8 + length :]
