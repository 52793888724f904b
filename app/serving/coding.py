"""Requests that give raw inputs: turned into tensors and back in threads of their own, around the servable."""

from dataclasses import dataclass, replace

from app.codecs import Arrays, LoadedCodec, chosen
from app.lanes import Crew
from app.paths import ModelPath
from app.servable import Answer, Question, Rejected
from app.serving.executor import Executor
from app.serving.forward import Forward, measure
from app.settings import Serving
from app.startup import Clock


@dataclass
class Coding:
    """The servable for both forms of requests; plain tensors pass. Its methods run on the event loop."""

    inner: Executor
    loaded: LoadedCodec
    raw: ModelPath
    crew: Crew
    limits: Serving
    clock: Clock
    inside: int = 0

    async def answer(self, question: Question) -> Answer:
        """Run one request; raises Rejected when it cannot be coded, too many wait, or its time has passed."""
        if chosen(self.inner.path(question.path), self.raw, question.arrays) is not self.raw:
            return await self.inner.answer(question)
        if self.inside >= self.limits.max_queue_items:
            raise Rejected(503, f"{self.inside} requests are with the codec; try again later", "queue_full")
        self.inside += 1
        try:
            return await self._coded(question)
        finally:
            self.inside -= 1

    def use(self, forward: Forward) -> None:
        """Run the requests that arrive from now on by another forward."""
        self.inner.use(forward)

    async def _coded(self, question: Question) -> Answer:
        measure(self.raw.inputs, question.arrays)
        began = self.clock()
        whole_s = min(question.timeout_s or self.limits.timeout_s, self.limits.timeout_s)

        def in_time() -> float:
            if (left_s := began + whole_s - self.clock()) <= 0:
                raise Rejected(504, f"not started within {whole_s:g} s", "deadline")
            return left_s

        def encode() -> Arrays:
            in_time()  # it may have waited for a thread
            return self.loaded.encode(question.arrays)

        arrays = await self.crew.run(encode)
        encode_s = self.clock() - began
        answer = await self.inner.answer(replace(question, arrays=arrays, timeout_s=in_time()))
        began_again = self.clock()
        outputs = await self.crew.run(lambda: self.loaded.decode(answer.outputs))
        return replace(answer, outputs=outputs, codec_s=encode_s + self.clock() - began_again)
