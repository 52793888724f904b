"""One batch on the device lane: joined, run and split again; an error stays with the request that it belongs to."""

from asyncio import Future
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from app.buckets import Route
from app.errors import DeviceLostError
from app.servable import Answer, Array, Question, Rejected
from app.serving.batching import Batching
from app.serving.forward import Forward
from app.startup import Clock

# Called on the device lane after each run with its inputs.
AfterRun = Callable[[Mapping[str, Array]], None]
Outcome = Answer | BaseException


@dataclass(eq=False, slots=True)
class Waiting:
    """A request that has been admitted and not answered; `answer` belongs to the event loop."""

    question: Question
    forward: Forward
    batching: Batching
    sizes: Mapping[str, int]
    route: Route
    bytes: int
    arrived: float
    deadline: float
    answer: Future[Answer]

    @property
    def items(self) -> int:
        """How much of a batch it is; a path without a batch runs it as one."""
        return self.sizes[self.batching.dimension] if self.batching.dimension else 1

    def late(self) -> Rejected:
        """Return the answer of a request that has not started within its time."""
        return Rejected(504, f"not started within {self.deadline - self.arrived:g} s", "deadline")


@dataclass(frozen=True, slots=True)
class Run:
    """One call of the model: what came of each of its requests; seconds it took, None where it failed."""

    batch: Sequence[Waiting]
    route: Route
    outcomes: Sequence[Outcome]
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs batches; called on the device lane alone. Raises DeviceLostError."""

    clock: Clock
    after_run: AfterRun

    def __call__(self, batch: Sequence[Waiting], route: Route) -> list[Run]:
        """Run a batch; what the lane's other work has made late never runs."""
        now = self.clock()
        late = [one for one in batch if now >= one.deadline]
        if late:
            told = Run(late, route, [one.late() for one in late])
            return [told, *self._again([one for one in batch if one not in late])]
        try:
            outputs = self._outputs(batch, route)
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - it belongs to the request, which answers with it
            if len(batch) == 1:
                return [Run(batch, route, [error])]
            middle = len(batch) // 2
            return [*self._again(batch[:middle]), *self._again(batch[middle:])]
        seconds = self.clock() - now
        rows = zip(batch, outputs, strict=True)
        answers = [Answer(own, one.items, route, max(0.0, now - one.arrived), seconds) for one, own in rows]
        return [Run(batch, route, answers, seconds)]

    def _again(self, requests: Sequence[Waiting]) -> list[Run]:
        """Run part of a batch, in as many runs as its sizes need."""
        left, runs = list(requests), list[Run]()
        while left:
            chosen, route = left[0].batching.choose(left)
            left = [one for one in left if one not in chosen]
            runs += self(chosen, route)
        return runs

    def _outputs(self, batch: Sequence[Waiting], route: Route) -> list[Mapping[str, Array]]:
        first, alone = batch[0], len(batch) == 1
        requests = [(one.question.arrays, one.sizes) for one in batch]
        arrays = first.question.arrays if alone else first.batching.join(requests, route)
        outputs = first.forward(arrays, route)
        self.after_run(arrays)
        return [outputs] if alone else list(first.batching.split(outputs, [one.sizes for one in batch]))
