"""What the start report holds of a bucket; the whole document is put together by `status`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BucketReport:
    """What warm-up and proof measured for one bucket; times in seconds.

    `state` is waiting, warm, failed or skipped; `proof` is golden, reference or none; `max_error` is the largest
    absolute difference from what it was compared with. `peak_bytes` and `kept_bytes`: host memory beyond what was
    resident before its first run, the most at any moment and what its last run left. `graphs`: traced for it by this
    process.
    """

    name: str
    required: bool
    state: str = "waiting"
    first_s: float | None = None
    second_s: float | None = None
    steady_s: float | None = None
    proof: str = "none"
    max_error: float | None = None
    graph: str = "none"
    why: str = ""
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    graphs: int = 0
