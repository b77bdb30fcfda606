"""What a block is called outside the process that computed it: a digest of everything its content depends on.

Keys are chained. A block's key covers its tokens and the key of the block before it; the first block's covers the
namespace, and that the root: weights, precision, runner, layout. So equal keys mean equal content, whoever computed it,
and a key says nothing of the text to someone who does not have the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

KEY_BYTES = 32


def root_key(identity: str) -> bytes:
    """`identity`: everything that decides a block's bytes beside namespace and tokens, in words."""
    return _digest(b"root", identity.encode("utf-8", "surrogatepass"))


def namespace_key(root: bytes, namespace: Sequence[str]) -> bytes:
    """What the first block of a sequence in `namespace` follows."""
    return _digest(b"namespace", root, *(name.encode("utf-8", "surrogatepass") for name in namespace))


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """`parent`: the key of the block before, or of the namespace."""
    return _digest(b"block", parent, np.array(tokens, "<i4").tobytes())


def _digest(*parts: bytes) -> bytes:
    """Of parts of which the first tells the kind. Each goes in behind its length, so that no two lists look alike."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
