"""The start-up graph, one file a stage; what each needs and gives is its signature.

open-checkpoint ──> preflight ──> read-weights ──┬──────────────────────────────────────┐
                                                 ├─> compute-reference ──────────────┐  │  (child, or a record)
import-runtime ──> acquire-device ──> find-artifact ──> build-artifact ─┬────────────┼──┤  (child, on a miss)
                                                                        └─> build-skeleton  (eager engine only)
                                                                                     │  │
                  install-weights <─────────────────────────────────────────────────┼──┘
                  install-weights ──> bind-engine ──> warm-buckets ──> prove-answers <┘
                      prove-answers + load-codec ──> prove-codec ──> rehearse-requests ──> ready
"""

from app.graph import Graph
from app.settings import Settings
from app.stages.acquire_device import acquire_device
from app.stages.bind_engine import bind_engine
from app.stages.build_artifact import build_artifact
from app.stages.build_skeleton import build_skeleton
from app.stages.compute_reference import compute_reference
from app.stages.find_artifact import find_artifact
from app.stages.import_runtime import import_runtime
from app.stages.install_weights import install_weights
from app.stages.load_codec import load_codec
from app.stages.open_checkpoint import open_checkpoint
from app.stages.preflight import preflight
from app.stages.prove_answers import prove_answers
from app.stages.prove_codec import prove_codec
from app.stages.read_weights import read_weights
from app.stages.rehearse_requests import Rehearsal, rehearse_requests
from app.stages.warm_buckets import warm_buckets

STARTUP = Graph(
    [
        open_checkpoint,
        preflight,
        read_weights,
        import_runtime,
        acquire_device,
        find_artifact,
        build_artifact,
        compute_reference,
        build_skeleton,
        install_weights,
        bind_engine,
        warm_buckets,
        prove_answers,
        load_codec,
        prove_codec,
        rehearse_requests,
    ],
    given=[Settings, Rehearsal],
)
