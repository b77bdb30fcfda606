"""What goes between ranks, and what the first one makes of silence and bad news."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pytest
import torch.distributed as dist

from inferloop.core.errors import EngineError, LaunchError
from inferloop.core.request import Sampling
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.parallel.lead import LeadRunner
from inferloop.engine.compute.torch.parallel.link import Link
from inferloop.engine.compute.torch.parallel.messages import End, Failed, Here, Ready, Step, decode_to_rank, encode
from inferloop.engine.compute.torch.parallel.ranks import Ranks
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec
from inferloop.engine.schedule.step import StepPlan, StepResult
from inferloop.models.resolve import ModelFiles

FOLLOWED = ("step_id", "slots", "offsets", "token_ids", "first_positions", "block_tables", "sample_rows", "num_drafts")


@pytest.fixture
def pair() -> Iterator[tuple[Link, Link]]:
    ours, theirs = map(Link, socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def a_plan() -> StepPlan:
    """A prompt's second chunk beside a whole prompt whose tokens' log-probabilities are wanted."""
    scheduler = Scheduler(
        ScheduleConfig(vocab_size=50, context_length=64, block_size=4, num_blocks=32, max_step_tokens=11)
    )
    scheduler.add(SequenceSpec("a", tuple(range(3, 20)), Sampling(max_tokens=4)))
    scheduler.add(SequenceSpec("b", tuple(range(5, 8)), Sampling(max_tokens=4, num_prompt_logprobs=1)))
    first = scheduler.schedule()
    assert first is not None
    counts = np.array([1 if row >= 0 else 0 for row in first.sample_rows])
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    scheduler.commit(first, StepResult(first.step_id, offsets, np.full(counts.sum(), 9, np.int32)))
    second = scheduler.schedule()
    assert second is not None
    return second


def test_a_plan_arrives_as_it_was_sent(pair: tuple[Link, Link]) -> None:
    plan = a_plan()
    assert plan.num_sequences > 1 and plan.prompt_rows is not None
    ours, theirs = pair
    ours.send(encode(Step.of(plan)))
    ours.send(encode(End()))
    step = decode_to_rank(theirs.receive())
    assert isinstance(step, Step) and not step.all_logits
    for name in FOLLOWED:
        np.testing.assert_array_equal(getattr(step.plan(), name), getattr(plan, name), err_msg=name)
    told = step.plan().prompt_rows
    assert told is not None
    np.testing.assert_array_equal(told.flat, plan.prompt_rows.flat)
    assert isinstance(decode_to_rank(theirs.receive()), End)
    known = {*FOLLOWED, "sampling", "copies", "loads", "saves", "prompt_rows", "pooled", "adapters"}
    assert {field.name for field in fields(StepPlan)} <= known, "does a rank have to know of the new one?"


def test_a_long_message_comes_in_pieces(pair: tuple[Link, Link]) -> None:
    ours, theirs = pair
    data = np.random.default_rng(0).bytes(5_000_000)
    sender = threading.Thread(target=ours.send, args=(data,))
    sender.start()
    assert theirs.receive(60) == data
    sender.join()


def test_silence_is_told_from_an_end(pair: tuple[Link, Link]) -> None:
    ours, theirs = pair
    with pytest.raises(TimeoutError):
        theirs.receive(0.01)
    ours.close()
    with pytest.raises(ConnectionError):
        theirs.receive(60)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (None, "rank 1 of 2 did not get ready within 0.01 s"),
        (b"", "rank 1 of 2 ended before it was ready"),
        (encode(Failed("ModelFileError", "w.gguf: too short")), "rank 1 of 2 cannot start: w.gguf: too short"),
    ],
    ids=["silent", "gone", "failed"],
)
def test_a_rank_that_does_not_get_ready(pair: tuple[Link, Link], said: bytes | None, error: str) -> None:
    ours, theirs = pair
    if said == b"":
        theirs.close()
    elif said is not None:
        theirs.send(said)
    with pytest.raises(LaunchError) as caught:
        Ranks([ours]).expect(Here, 0.01 if said is None else 60)
    assert str(caught.value) == error


def test_a_rank_that_never_joins_is_a_launch_error(pair: tuple[Link, Link], embedded_model: ModelFiles) -> None:
    """It is there, and says nothing: before it is waited for at the group, and after."""
    ours, theirs = pair
    with pytest.raises(LaunchError, match=r"rank 1 of 2 did not get ready within 0\.2 s"):
        LeadRunner.load(embedded_model, TorchConfig(num_blocks=8), Ranks([ours]), join_timeout_s=0.2)
    theirs.send(encode(Here()))
    with pytest.raises(LaunchError, match=r"the 2 ranks did not meet within 0\.2 s"):
        LeadRunner.load(embedded_model, TorchConfig(num_blocks=8), Ranks([ours]), meet_timeout_s=0.2)
    assert dist.get_pg_count() == 0, "what failed does not name the next group"


def test_what_whoever_watches_says_wins_over_a_broken_connection(pair: tuple[Link, Link]) -> None:
    ranks = Ranks([pair[0]])
    seen = EngineError("rank 1 was killed")
    threading.Timer(0.05, ranks.lose, [seen]).start()
    assert ranks.lost_by(RuntimeError("Connection closed by peer"), patience_s=60) is seen
    other = Ranks([pair[0]])
    assert str(other.lost_by(RuntimeError("timed out"), patience_s=0)) == "the 2 ranks cannot go on: timed out"
    assert other.lost.done()


def test_ready_ranks_tell_what_they_took(pair: tuple[Link, Link]) -> None:
    pair[1].send(encode(Ready(7, 5)))
    assert Ranks([pair[0]]).expect(Ready, 60) == [Ready(7, 5)]
