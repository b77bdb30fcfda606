"""The ranks' meeting place on torch.distributed: gloo between CPUs, nccl between CUDA devices."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from inferloop.core.errors import EngineError, LaunchError
from inferloop.engine.compute.torch.parallel.split import Share, even

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore  # torch.distributed.TCPStore, which its stubs do not export

_LOOPBACK = "127.0.0.1"


def open_store(timeout_s: float) -> tuple[TCPStore, int]:
    """Where ranks find each other, kept by the first one, and the free port of the loopback that it listens on."""
    with socket.socket() as listener:
        listener.bind((_LOOPBACK, 0))
        port = int(listener.getsockname()[1])
        store: TCPStore = dist.TCPStore(  # type: ignore[attr-defined]
            _LOOPBACK,
            port,
            is_master=True,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, port


def find_store(port: int, timeout_s: float) -> TCPStore:
    """The one that `open_store` of another process made."""
    store: TCPStore = dist.TCPStore(  # type: ignore[attr-defined]
        _LOOPBACK, port, timeout=datetime.timedelta(seconds=timeout_s)
    )
    return store


class ProcessGroup:
    """A Group over processes. There is one in a process at a time. Its calls raise EngineError when another rank is
    gone, or has not come to the same call within the time that it was joined with."""

    def __init__(self, share: Share, vocab_size: int, *, ordered: bool) -> None:
        """Of ranks that have joined. `ordered`: sums are made in the order of the ranks, whatever the number of rows,
        which costs time."""
        self._rank, self._size, self._vocab = share.rank, share.size, share.vocab
        self._ordered = ordered
        self._widths = [len(even(vocab_size, rank, share.size)) for rank in range(share.size)]

    @staticmethod
    def join(store: TCPStore, share: Share, device: torch.device, timeout_s: float) -> None:
        """Blocks until all have. `timeout_s` bounds this, and every later call. Raises LaunchError."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody outside of this host is to connect
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        try:
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=store,
                rank=share.rank,
                world_size=share.size,
                timeout=datetime.timedelta(seconds=timeout_s),
                device_id=device if cuda else None,
            )
        except RuntimeError as problem:
            # Groups are named by a count, which a group that came to nothing would leave ahead of other processes'.
            dist.distributed_c10d._world.group_count = 0
            raise LaunchError(f"the {share.size} ranks did not meet within {timeout_s:g} s: {problem}") from problem

    @staticmethod
    def leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def sum(self, x: Tensor) -> Tensor:
        if not self._ordered:
            with _meeting():
                dist.all_reduce(x)
            return x
        parts = [torch.empty_like(x) for _ in range(self._size)]
        with _meeting():
            dist.all_gather(parts, x)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        places = token_ids - self._vocab.start
        own = (places >= 0) & (places < len(self._vocab))
        found = F.embedding(torch.where(own, places, 0), table)
        rows = found.masked_fill_(~own[:, None], 0)
        with _meeting():
            dist.all_reduce(rows)  # but for one rank's, all are zero: nothing is rounded
        return rows

    def whole_logits(self, logits: Tensor) -> Tensor:
        padded = F.pad(logits, (0, max(self._widths) - logits.shape[1])).contiguous()
        parts = None if self._rank else [torch.empty_like(padded) for _ in range(self._size)]
        with _meeting():
            dist.gather(padded, parts)
        if parts is None:
            return logits
        return torch.cat([part[:, :width] for part, width in zip(parts, self._widths, strict=True)], 1)


@contextlib.contextmanager
def _meeting() -> Iterator[None]:
    try:
        yield
    except RuntimeError as problem:
        raise EngineError(f"a rank did not meet the others: {problem}") from problem
