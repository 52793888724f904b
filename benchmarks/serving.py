"""Serving against nothing but the network and against nothing but the model: throughput, latency, wire formats.

Both sides of a ratio are measured in turn in one run on one machine; the load generator shares its processors.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks.bare import SEQUENCE
from benchmarks.echo import PATH, echoing
from benchmarks.process import Sidecar, figure, inference
from benchmarks.small import WIDE, WIDTH, as_json, as_raw, configured, values
from benchmarks.table import Row
from benchmarks.wrk import Body, Load, hammer

CONCURRENCY = 32
ROUNDS = 5
SECONDS = 4
LARGE_CONCURRENCY = 4


def measure_tiny(directory: Path) -> Iterator[Row]:
    """Yield what the server adds to a model that takes no time."""
    body = as_json(values(1, WIDTH))
    config = configured(directory, "tiny", WIDTH, 1)
    with echoing() as bare, Sidecar(directory / "store", config=config) as sidecar:
        sidecar.wait()
        sides = [(sidecar.port, "/v2/models/tiny/infer"), (bare, PATH)]
        many = _in_turn(sides, body, CONCURRENCY)
        single = _in_turn(sides, body, 1)
    ours, echo = (statistics.median(load.per_second for load in loads) for loads in many)
    text = f"0.30 × bare Starlette that echoes, {echo:.0f} /s"
    yield Row(f"tiny, 1×{WIDTH} as JSON, concurrency {CONCURRENCY}", ours, 0.30 * echo, "/s", text, least=True)
    ours_s, echo_s = (statistics.median(load.p50_s for load in loads) for loads in single)
    forward_s = figure("benchmarks.bare", "tiny", directory)["1"]
    text = f"0.25 ms; echo {echo_s * 1e3:.3f} ms, forward {forward_s * 1e3:.3f} ms"
    beyond = max(0.0, ours_s - echo_s - forward_s)
    yield Row("tiny, concurrency 1: p50 beyond the echo and the bare forward", beyond * 1e3, 0.25, "ms", text)


def _in_turn(sides: list[tuple[int, str]], body: Body, connections: int) -> list[list[Load]]:
    """Return the loads of each side; a round asks both, the next one in the other order."""
    loads: list[list[Load]] = [[] for _ in sides]
    for turn in range(ROUNDS):
        for side in sorted(range(len(sides)), reverse=turn % 2 == 1):
            port, path = sides[side]
            loads[side].append(hammer(port, path, body, connections, SECONDS))
    return loads


def measure_batches(directory: Path) -> Iterator[Row]:
    """Yield the throughput of single sequences against the best batch that one can run by hand."""
    body = Body(inference(1, SEQUENCE))
    with Sidecar(directory / "store", "compile.engine=aot") as sidecar:
        sidecar.wait()
    rates, bare_rates = [], []
    for _ in range(ROUNDS):
        bare = figure("benchmarks.bare", "minilm", directory / "store")
        bare_rates.append({batch: int(batch) / seconds for batch, seconds in bare.items()})
        with Sidecar(directory / "store", "compile.engine=aot") as sidecar:
            sidecar.wait()
            hammer(sidecar.port, "/v2/models/minilm/infer", body, CONCURRENCY, 1)
            rates.append(hammer(sidecar.port, "/v2/models/minilm/infer", body, CONCURRENCY, SECONDS).per_second)
    best = {batch: statistics.median(one[batch] for one in bare_rates) for batch in bare_rates[0]}
    told = ", ".join(f"{batch}: {rate:.0f} /s" for batch, rate in best.items())
    text = f"0.90 × the best bare batched forward ({told})"
    what = f"MiniLM, one sequence of {SEQUENCE} tokens, concurrency {CONCURRENCY}"
    yield Row(what, statistics.median(rates), 0.90 * max(best.values()), "/s", text, least=True)
    yield Row("… of one sequence at a time, bare", best["1"], None, "/s", "what batching is worth is the ratio to it")


def measure_binary(directory: Path) -> Iterator[Row]:
    """Yield tensors of 1 MiB raw against the same as JSON, both ways."""
    rows, width = WIDE
    array = values(rows, width)
    config = configured(directory, "wide", width, rows)
    with Sidecar(directory / "store", config=config) as sidecar:
        sidecar.wait()
        path = "/v2/models/wide/infer"
        raw, text = [], []
        for _ in range(ROUNDS):
            text.append(hammer(sidecar.port, path, as_json(array), LARGE_CONCURRENCY, SECONDS).per_second)
            raw.append(hammer(sidecar.port, path, as_raw(array), LARGE_CONCURRENCY, SECONDS).per_second)
    slow = statistics.median(text)
    what = f"tensors of 1 MiB raw, both ways, concurrency {LARGE_CONCURRENCY}"
    yield Row(what, statistics.median(raw), 5 * slow, "/s", f"5 × the same as JSON, {slow:.3g} /s", least=True)
