"""Decoding where the CPU has the whole model: a token is one launch instead of a wave's actions.

Between compiled calls Python runs from memory that the weights have pushed out of every cache, so each action costs a
token some hundred microseconds.
"""

from __future__ import annotations

import torch

from overspill.device.base import Devices
from overspill.device.lane import Lane
from overspill.pipeline.schedule import WaveSchedule
from overspill.pipeline.split import Layout
from overspill.pipeline.wave import Wave
from overspill.pipeline.work import Work


class HostSteps:
    """Runs steps of one sequence."""

    def __init__(self, devices: Devices, work: Work) -> None:
        self._stream = devices.host.stream(Lane.COMPUTE)
        self._work = work

    @classmethod
    def serves(cls, layout: Layout) -> bool:
        """Whether the CPU has all of the model."""
        used = {*layout.layer_device, layout.output_device, *layout.input_devices}
        return used == {layout.host} and not any(layout.slabs)

    def suits(self, wave: Wave, schedule: WaveSchedule) -> bool:
        """Whether a wave is one token whose logits are wanted."""
        return wave.n_tokens == 1 and wave.ubatches[0].output_rows == (0,)

    def run_host(self, wave: Wave, schedule: WaveSchedule) -> list[torch.Tensor]:
        """Compute a step; logits as `Runner.run` gives them."""
        (ubatch,), found = wave.ubatches, list[torch.Tensor]()
        body = self._work.one_token(ubatch)
        self._stream.launch(lambda: found.append(body()), label="step")
        self._stream.record().wait_host()
        return found
