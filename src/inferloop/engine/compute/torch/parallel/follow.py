"""What a rank other than the first does: takes its share, and follows the first rank's steps."""

from __future__ import annotations

from pathlib import Path

from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.parallel.link import Link
from inferloop.engine.compute.torch.parallel.messages import End, Here, Job, Ready, Step, decode_to_rank, encode
from inferloop.engine.compute.torch.parallel.process_group import ProcessGroup, find_store
from inferloop.engine.compute.torch.parallel.share import device_of, load_share
from inferloop.engine.compute.torch.parallel.split import share_of
from inferloop.models.resolve import open_files


def follow(link: Link, job: Job) -> None:
    """Until the first rank ends the job. Raises what loading raises, ConnectionError when the first rank is gone, and
    EngineError when any is while they compute."""
    files = open_files(job.path, Path(job.path))
    share = share_of(files.header, job.rank, job.size)
    link.send(encode(Here()))
    store = find_store(job.port, job.timeout_s)
    config = TorchConfig(**job.config)
    try:
        ProcessGroup.join(store, share, device_of(config, job.rank), job.timeout_s)
        runner = load_share(files, share, config)
        link.send(encode(Ready(runner.info.weight_bytes, runner.info.kv_bytes)))
        while isinstance(step := decode_to_rank(link.receive()), Step):
            plan = step.plan()
            if step.all_logits:
                runner.logits(plan)
            else:
                runner.follow(plan)
        assert isinstance(step, End), "a job within a job"
    finally:
        ProcessGroup.leave()
