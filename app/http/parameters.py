"""Parameters of requests, inputs and outputs: which are known, and what clients write for numbers and flags."""

from collections.abc import Mapping
from typing import Any

from app.servable import Rejected

# Parameters of extensions that change the answer's meaning: to ignore them would be a wrong answer.
_UNSERVED: Mapping[str, str] = {
    "shared_memory_region": "shared memory is not supported; send and take the values themselves",
    "classification": "classification is not supported; take the values themselves",
    "sequence_id": "sequences are not supported; every request stands alone",
}

Parameters = Mapping[str, Any]


def is_count(value: Any) -> bool:
    """A whole number that is not negative; some languages write 3 as 3.0; a boolean is a number for Python alone."""
    return type(value) in (int, float) and value >= 0 and float(value).is_integer()


def timeout_s(parameters: Parameters) -> float | None:
    """Return the parameter `timeout`, which clients give in microseconds; 0 means none of their own."""
    asked = parameters.get("timeout")
    if asked is None:
        return None
    if not is_count(asked):
        raise Rejected(400, f"the parameter timeout must be whole microseconds, got {asked!r}")
    return asked / 1e6 or None


def parameters_of(owner: str, row: Mapping[str, Any]) -> Parameters:
    """Return the parameters of a row; raises Rejected: 400 where they are none, 501 for those of extensions."""
    found = row.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise Rejected(400, f"{owner}: parameters must be an object")
    for name, why in _UNSERVED.items():
        if found.get(name):
            raise Rejected(501, f"{owner}: {why}")
    return found


def flag(owner: str, parameters: Parameters, name: str, otherwise: bool = False) -> bool:
    """Return a parameter that is true or false, `otherwise` where it is not given; raises Rejected (400)."""
    found = parameters.get(name)
    if found is None:
        return otherwise
    if not isinstance(found, bool):
        raise Rejected(400, f"{owner}: {name} must be true or false, got {found!r}")
    return found
