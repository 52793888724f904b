"""Open the engine on the installed weights, by reference."""

from dataclasses import dataclass

from app import plugins
from app.artifacts import Compiled, Uncompiled
from app.engines import Engine
from app.graph import Lane, stage
from app.progress import Progress
from app.serving.forward import Forward
from app.settings import Settings
from app.weights import LoadedModel


@dataclass(frozen=True, slots=True)
class BoundEngine:
    """An engine with its weights, and which shapes it serves how; nothing has run yet."""

    forward: Forward
    name: str


@stage(Lane.DEVICE)
def bind_engine(
    settings: Settings, loaded: LoadedModel, code: Compiled | Uncompiled, progress: Progress
) -> BoundEngine:
    """Give the engine that serves: the compiled code where there is some, else the module itself."""
    name = code.engine if isinstance(code, Compiled) else "eager"
    artifact = code.artifact if isinstance(code, Compiled) else None
    engine = plugins.load("app.engines", name, Engine).open(loaded, artifact)
    module, told = None, ""
    if settings.uncovered == "eager" and name != "eager":
        module = plugins.load("app.engines", "eager", Engine).open(loaded, None)
        told = ", what is uncovered by the module itself"
    forward = Forward(engine, settings.model_paths, settings.uncovered, module)
    if rejecting := [one.path for one in forward.coverages.values() if one.policy != settings.uncovered]:
        told = f", {', '.join(rejecting)} rejects other shapes: not every input says what to pad with"
    progress.say(f"{name}, {'one code for every shape' if engine.dynamic else 'one code a bucket'}{told}")
    return BoundEngine(forward, name)
