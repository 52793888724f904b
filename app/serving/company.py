"""Find out whether a model's answer depends on the requests that it runs together with, before anybody's does."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from app.buckets import Bucket, Refusal, Route
from app.paths import Company, ModelPath
from app.servable import Array
from app.serving.batching import Batching
from app.serving.forward import Forward

Arrays = Mapping[str, Array]
# Returns why outputs are not the expected ones, or an empty text.
Differs = Callable[[Arrays, Arrays], str]


def in_company(
    forward: Forward, inputs: Mapping[str, Arrays], outputs: Mapping[str, Arrays], differs: Differs
) -> Forward:
    """Return the forward with what its paths bear: company of any length, of the same lengths, or none, and why.

    Called on the device lane with the inputs and outputs of warm buckets by name.
    """
    paths = {name: _Trial(forward, name, inputs, outputs, differs).path() for name in forward.paths}
    forward.engine.restore_buffers()
    return forward.along(paths.values())


class _Trial:
    """Runs the first and the last row of a warm bucket alone and compares them with what they were beside others."""

    def __init__(
        self,
        forward: Forward,
        path: str,
        inputs: Mapping[str, Arrays],
        outputs: Mapping[str, Arrays],
        differs: Differs,
    ) -> None:
        self._forward, self._path = forward, forward.paths[path]
        self._batching = Batching.of(self._path, forward.coverages[path])
        self._inputs, self._outputs, self._differs = inputs, outputs, differs

    def path(self) -> ModelPath:
        """Return the path with its company."""
        dimension = self._batching.dimension
        if dimension is None:
            return self._bears(Company.NONE, "its tensors do not all begin with one symbolic dimension")
        several = [bucket for bucket in self._path.buckets if dict(bucket.sizes)[dimension] > 1]
        if not several:
            return self._bears(Company.NONE, f"no bucket holds more than one {dimension}")
        bucket = min(several, key=lambda one: one.volume)
        try:
            return self._try(bucket, dimension)
        except Exception as error:  # noqa: BLE001 - the model is proven without company; it goes on without
            return self._bears(Company.NONE, f"a row of {bucket.name} could not be run alone: {error}")

    def _bears(self, company: Company, why: str = "") -> ModelPath:
        return replace(self._path, company=company, company_why=why)

    def _try(self, bucket: Bucket, dimension: str) -> ModelPath:
        rows = dict(bucket.sizes)[dimension]
        full = {**dict(bucket.sizes), dimension: 1}
        requests = [(self._row(self._inputs[bucket.name], row, full), full) for row in range(rows)]
        beside = self._batching.split(self._outputs[bucket.name], [full] * rows)
        for row in (0, rows - 1):
            if why := self._differs(self._alone(*requests[row]), beside[row]):
                return self._bears(Company.NONE, f"row {row} of {bucket.name} answers otherwise when alone: {why}")
        short = {name: size if name == dimension else self._shorter(name, size) for name, size in full.items()}
        if len(full) == 1:
            return self._bears(Company.ANY)
        if short == full or not self._path.paddable:
            why = "has the smallest lengths" if short == full else "cannot be padded: an input has no value to pad with"
            return self._bears(Company.SAME_LENGTHS, f"{bucket.name} {why}")
        requests[-1] = (self._row(self._inputs[bucket.name], rows - 1, short), short)
        route = Route.exactly(bucket)
        mixed = self._forward(self._batching.join(requests, route), route)
        padded = self._batching.split(mixed, [sizes for _, sizes in requests])[-1]
        if why := self._differs(self._alone(*requests[-1]), padded):
            return self._bears(Company.SAME_LENGTHS, f"a shorter row of {bucket.name} answers otherwise padded: {why}")
        return self._bears(Company.ANY)

    def _shorter(self, name: str, size: int) -> int:
        least = next(one.min for one in self._path.dimensions if one.name == name)
        return max(least, size - max(1, size // 8))

    def _row(self, arrays: Arrays, row: int, sizes: Mapping[str, int]) -> Arrays:
        shapes = {spec.name: spec.sized(sizes) for spec in self._path.inputs}
        cut = {name: (slice(row, row + 1), *(slice(size) for size in shape[1:])) for name, shape in shapes.items()}
        return {name: arrays[name][cut[name]] for name in shapes}

    def _alone(self, arrays: Arrays, sizes: Mapping[str, int]) -> Arrays:
        route = self._batching.coverage.route(sizes)
        if isinstance(route, Refusal):
            raise ValueError(route.why)
        return self._forward(arrays, route)
