"""What warm-up may take: seconds for all buckets, and memory for each, looked at before it is run."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from app.buckets import Bucket
from app.errors import ResourceError, WarmupError
from app.footprint import Footprint
from app.ledger import Books
from app.settings import Warmup


class BudgetSpentError(WarmupError):
    """No time is left for a bucket."""


class DoesNotFitError(ResourceError):
    """A bucket needs more memory than there is, or than it may take."""


@dataclass(slots=True)
class Budget:
    """One warm-up's budget; `until` on the clock of `time.monotonic`.

    What a bucket will need is not known before it has run. It is taken to grow with the product of its sizes, from the
    largest bucket that has run: a lower bound, since attention grows faster.
    """

    limits: Warmup
    until: float
    free_bytes: Callable[[], int]
    largest: Bucket | None = None
    peak_bytes: int = 0

    @classmethod
    def begin(cls, limits: Warmup) -> "Budget":
        """Begin now; what is free is what the machine and the cgroups say."""
        return cls(limits, time.monotonic() + limits.budget_s, lambda: Books().room().free_bytes)

    def allow(self, bucket: Bucket) -> None:
        """Return if a bucket may be run; raises BudgetSpentError or DoesNotFitError with the numbers."""
        if time.monotonic() > self.until:
            raise BudgetSpentError(
                f"warmup.budget_s = {self.limits.budget_s:g} was spent before bucket {bucket.name}; "
                "raise it or warm fewer"
            )
        if self.largest is None:
            return
        need = math.ceil(self.peak_bytes * bucket.volume / self.largest.volume)
        told = f"bucket {bucket.name} needs about {need} bytes, as {self.largest.name} took {self.peak_bytes}"
        if self.limits.budget_bytes is not None and need > self.limits.budget_bytes:
            raise DoesNotFitError(f"{told}; warmup.budget_bytes = {self.limits.budget_bytes}; raise it or warm fewer")
        if need > (free := self.free_bytes()):
            raise DoesNotFitError(f"{told}, and {free} are free; raise the memory limit or warm fewer")

    def took(self, bucket: Bucket, taken: Footprint) -> None:
        """Note what a bucket took; raises DoesNotFitError where that was more than it may."""
        if taken.peak_bytes is None:
            return
        if self.limits.budget_bytes is not None and taken.peak_bytes > self.limits.budget_bytes:
            raise DoesNotFitError(
                f"bucket {bucket.name} took {taken.peak_bytes} bytes, warmup.budget_bytes = "
                f"{self.limits.budget_bytes}; raise it or warm smaller buckets"
            )
        if self.largest is None or bucket.volume >= self.largest.volume:
            self.largest, self.peak_bytes = bucket, taken.peak_bytes
