"""Who the C++ compiler is, answered from a record: torch asks it even where nothing is left to compile."""

import functools
import subprocess
from collections.abc import Sequence
from typing import Any

# Questions about the compiler, by what follows its name.
_QUESTIONS = {("--version",), ("-v",), ("-dumpfullversion", "-dumpversion")}


class Compiler:
    """Stands where torch's builder looks for `subprocess`: answers what is recorded, and records what is asked.

    Everything else goes to the real module, so that what must be compiled after all is compiled.
    """

    def __init__(self, recorded: dict[str, str] | None = None) -> None:
        self.answers = {} if recorded is None else dict(recorded)
        self._ask = recorded is None

    def __getattr__(self, name: str) -> Any:
        """Return what the real module has."""
        return getattr(subprocess, name)

    def check_output(self, command: Sequence[str], **options: Any) -> bytes:
        """Answer a question from the record; raises what the real function raises."""
        question = " ".join(command)
        if tuple(command[1:]) in _QUESTIONS and question in self.answers:
            return self.answers[question].encode()
        found: bytes = subprocess.check_output(command, **options)
        if self._ask and tuple(command[1:]) in _QUESTIONS:
            self.answers[question] = found.decode(errors="replace")
        return found

    def answer(self) -> None:
        """Take the place in torch's builder, and forget what it was told before."""
        from torch._inductor import cpp_builder

        cpp_builder.subprocess = self
        for cached in vars(cpp_builder).values():
            if isinstance(cached, functools._lru_cache_wrapper):
                cached.cache_clear()
