"""Single flight: of all processes that miss the same artifact one builds it, and the others wait and restore it."""

import contextlib
import errno
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app.artifacts import Artifact, Layer, Missed, Restored
from app.artifacts.lease import TERMS, Held, Lease, Terms
from app.artifacts.store import Store
from app.artifacts.writers import make_private
from app.errors import printable
from app.progress import Progress, Stopped

log = logging.getLogger("warmgate.flight")

FAILED = ".failed-"
_STOP_S = 0.05  # how often a waiting process looks whether it was told to end
_FAILURES = 32  # holders whose builds failed that are remembered
_LOOK_S = 0.25  # and how often it looks at the store


@dataclass(slots=True)
class Turn:
    """What to do about a missing artifact: take what another process has `published`, or build it and `publish`.

    `why` tells what became of the waiting, where there was any; `failure` is what ended the build that was waited for.
    """

    view: "_View"
    published: Restored | None = None
    held: Held | None = None
    why: str = ""
    failure: str = ""

    def publish(self, payload: Path) -> Artifact:
        """Put a sealed directory in its place; where another process was first, theirs is given. Raises OSError."""
        store, identity = self.view.store, self.view.lookup.identity
        if self.held is not None and not self.held.holds():
            log.warning("the lease on building %s was lost; what is published first counts", identity.key()[:12])
        found = store.find(identity, self.view.checkpoint)
        if isinstance(found, Restored):
            return found.artifact
        if any(layer.result == "rejected" for layer in found.layers):
            store.set_aside(identity)
        return store.publish(payload, identity)


@contextlib.contextmanager
def flight(
    store: Store,
    lookup: Missed,
    checkpoint: Path,
    progress: Progress,
    wait_s: float,
    terms: Terms = TERMS,
) -> Iterator[Turn]:
    """Give the turn: what another process has published while this one waited, or the lease on building it.

    After `wait_s` the turn is to build without the lease. Leaving the block gives the lease back; an error that is
    raised in it is left for those who wait. Raises Stopped when the start-up is stopped, ArtifactError where the store
    cannot be written.
    """
    view = _View(store, lookup, checkpoint)
    try:
        make_private(store.path)
        turn = _Waiting(view, Lease(store.path, lookup.identity.key(), terms), progress, wait_s).end()
    except OSError as error:
        raise store.unwritable(error) from error
    if turn.held is None:
        yield turn
        return
    with turn.held.keep():
        try:
            yield turn
        except Exception as error:
            if not isinstance(error, Stopped):
                view.leave_failure(turn.held.holder.token, str(error))
            raise
        with contextlib.suppress(OSError):
            view.failure_file.unlink(missing_ok=True)


@dataclass(slots=True)
class _View:
    """The one artifact in its store; verifies anew only what has changed."""

    store: Store
    lookup: Missed
    checkpoint: Path
    _known: tuple[int, int] | None = None

    def look(self) -> Restored | None:
        """Return the artifact once another process has published it."""
        state = self.store.state(self.lookup.identity)
        if state is None or state == self._known:
            return None
        self._known = state
        found = self.store.find(self.lookup.identity, self.checkpoint)
        return found if isinstance(found, Restored) else None

    @property
    def failure_file(self) -> Path:
        return self.store.path / f"{FAILED}{self.lookup.identity.key()}"

    def leave_failure(self, token: str, why: str) -> None:
        """Tell those who wait for the holder of this token that waiting for the next one is no use.

        Who waited for an earlier one may look only now: the newest few are told of together.
        """
        tokens = [*self.failure()[0], token][-_FAILURES:]
        temporary = self.failure_file.with_name(f"{self.failure_file.name}.{token}")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps({"tokens": tokens, "why": why.splitlines()[0][:300] if why else ""}))
            temporary.replace(self.failure_file)

    def failure(self) -> tuple[list[str], str]:
        """Return the tokens of those who failed, and why the last one did, as far as that can be read."""
        try:
            with self.failure_file.open("rb") as file:
                found = json.loads(file.read(8192))
            return [str(token) for token in found["tokens"]], printable(str(found["why"])[:300])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return [], ""


@dataclass(slots=True)
class _Waiting:
    view: _View
    lease: Lease
    progress: Progress
    wait_s: float
    clock: Callable[[], float] = time.monotonic
    holders: dict[str, str] = field(default_factory=dict)  # token → who it was
    told: Any = None

    def end(self) -> Turn:
        """Return the turn once there is one."""
        began = self.clock()
        while True:
            self.progress.check()
            try:
                turn = self._turn(self.clock() - began)
            except OSError as error:
                if error.errno != errno.ESTALE:  # a file server's word for: it has changed, look again
                    raise
                turn = None
            if turn:
                self.progress.say(turn.why)
                return turn
            self._tell(self.clock() - began)
            until = self.clock() + _LOOK_S
            while self.clock() < until:
                self.progress.check()
                time.sleep(_STOP_S)

    def _turn(self, waited_s: float) -> Turn | None:
        if found := self.view.look():
            return self._theirs(found, waited_s)
        held = self.lease.acquire()
        tokens, why = self.view.failure()
        if failed := [self.holders[token] for token in tokens if token in self.holders]:
            # What one cannot build the next one cannot either, as a rule: all try at once, none after the other.
            return replace(self._alone(f"the build of {failed[-1]} failed ({why})"), held=held, failure=why)
        if held:
            # Its last holder may have published between the two looks.
            if found := self.view.look():
                held.release()
                return self._theirs(found, waited_s)
            return Turn(self.view, held=held)
        if waited_s >= self.wait_s:
            return self._alone(f"compile.wait_s = {self.wait_s:g} s are over and {self._holder()} still builds")
        return None

    def _theirs(self, found: Restored, waited_s: float) -> Turn:
        builder = list(self.holders.values())[-1:] or ["another process"]
        why = f"built by {builder[0]} while this process waited {waited_s:.0f} s"
        log.info("%s", why)
        layers = tuple(Layer(one.name, one.result, one.why or why, one.count) for one in found.layers)
        return Turn(self.view, published=Restored(found.artifact, layers), why=why)

    def _alone(self, why: str) -> Turn:
        log.warning("%s: this process does not wait any longer", why)
        return Turn(self.view, why=f"built by this start too, since {why}")

    def _holder(self) -> str:
        seen = self.lease.look()
        return str(seen.holder) if seen and seen.holder else "another process"

    def _tell(self, waited_s: float) -> None:
        """Say whose build is waited for; only a lease that is renewed changes the sentence, as a sign of life."""
        seen = self.lease.look()
        if seen is None or seen == self.told:
            return
        self.told = seen
        if seen.holder:
            self.holders[seen.holder.token] = str(seen.holder)
        self.progress.say(f"waiting for the build of {self._holder()}, {waited_s:.0f} s")
