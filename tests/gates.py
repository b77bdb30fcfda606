"""Engines that stand still until they are told to go on, so that what a test looks at lasts as long as it looks."""

from __future__ import annotations

import asyncio
import math
import threading

from tests.waiting import PATIENCE_S

from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.engine.compute.echo import EchoRunner
from inferloop.engine.schedule.step import StepResult


class GatedScript(ScriptedGenerator):
    """The model "m"; gives nobody a token while the gate is closed. It is open at first."""

    def __init__(self, script: Script) -> None:
        super().__init__(script, model_id="m")
        self.gate = asyncio.Event()
        self.gate.set()

    async def sleep_until(self, t_ns: int) -> None:
        await super().sleep_until(t_ns)
        await self.gate.wait()


class GatedRunner(EchoRunner):
    """Ends no step while the gate is closed, which is open at first, and fails once so many steps are done."""

    num_good_steps: float = math.inf

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.gate = threading.Event()
        self.gate.set()

    def wait(self) -> StepResult:
        assert self.gate.wait(PATIENCE_S)
        self.num_good_steps -= 1
        if self.num_good_steps < 0:
            raise RuntimeError("the device fell off the bus")
        return super().wait()
