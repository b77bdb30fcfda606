"""Tokenizing a long prompt must not stop the other threads, of which one computes everybody's tokens."""

from __future__ import annotations

import threading
import time

from inferloop.engine.text.tokenizer import load_tokenizer
from inferloop.models.resolve import ModelFiles


def test_encoding_lets_other_threads_run(embedded_model: ModelFiles) -> None:
    tokenizer = load_tokenizer(embedded_model)
    text = "word salad and some numbers 12345 " * 20_000
    num_ids: list[int] = []
    thread = threading.Thread(target=lambda: num_ids.append(len(tokenizer.encode(text, allow_special=True))))
    num_turns = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)  # coming back from it takes the interpreter lock
        num_turns += 1
    assert num_ids[0] > 100_000
    assert num_turns >= 20, "with the lock held there are one or two turns"
