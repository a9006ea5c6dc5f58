"""Engine that works a step ahead, over a device that computes each step as late as it may and keeps what it was given:
a block that came free beneath it, a token fed from the wrong row or a step too many fails the test.
"""

from collections import defaultdict

from diptych.workers.common.request import SamplingParams
from diptych.workers.core.runner import LayerWatch
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import Batch, SampledToken
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.testing.fake_runner import FakeRunner
from diptych.workers.testing.fake_stream import FakeStep

from .engines import Clock, tokens


class Device(FakeRunner):
    """Records which content each block of a step had when it was launched."""

    def __init__(self, num_blocks: int, clock: Clock) -> None:
        super().__init__(num_blocks=num_blocks, looks_ahead=True)
        self.generations: list[int] = []
        self.fed: list[list[int]] = []  # of each step that was launched ahead
        self.num_waited_for = 0  # steps that were launched while none was under way
        self.clock = clock
        self.takes_s = 0.0
        self.fails = False
        self._given: dict[FakeStep, list[int]] = {}

    @property
    def has_borrowed_cores(self) -> bool:
        return False

    def takes_input_from_previous(self, sampling: SamplingParams) -> bool:
        return sampling.logprobs is None

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> FakeStep:
        self.num_waited_for += not self.stream
        step = super().launch(batch, watch)
        self._given[step] = self._contents(step)
        if batch.previous_entries:
            self.fed.append(list(batch.previous_entries))
        return step

    def _compute(self, step: FakeStep) -> list[SampledToken]:
        assert self._contents(step) == self._given.pop(step), "a block was given to somebody else beneath a step"
        if self.fails:
            self.fails = False
            raise RuntimeError("the device is gone")
        self.clock.now += self.takes_s
        return super()._compute(step)

    def _contents(self, step: FakeStep) -> list[int]:
        return [self.generations[block] for row in step.rows for block in row.table]


def make_ahead(num_blocks: int = 64, *, prefix_cache: bool = True, clock: Clock | None = None, **config: int) -> Engine:
    device = Device(num_blocks, clock or Clock())
    engine = Engine(device, SchedulerConfig(**config), prefix_cache=prefix_cache, clock=device.clock)
    device.generations = engine.manager.generations
    return engine


def device_of(engine: Engine) -> Device:
    assert isinstance(engine._runner, Device)
    return engine._runner


def fed(engine: Engine) -> list[list[int]]:
    return device_of(engine).fed


def ids(outputs: list[StepOutput], key: str) -> list[int]:
    return [event.token_id for event in tokens(outputs, key)]


def ids_by_key(outputs: list[StepOutput]) -> dict[str, list[int]]:
    """Tokens of every sequence that has any, in one pass."""
    found = defaultdict[str, list[int]](list)
    for output in outputs:
        for event in output.tokens:
            found[event.key].append(event.token_id)
    return dict(found)
