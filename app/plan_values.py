"""What both kinds of files of the planner have in common: which values are allowed, and how others are refused."""

from collections.abc import Sequence
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from app.errors import SettingsError
from app.validation import problems_of

Value = TypeVar("Value")
Document = TypeVar("Document", bound=BaseModel)


def _number(value: Value) -> Value:
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


# A billion seconds are 31 years: sums of what is allowed stay finite, and NaN is not allowed.
Seconds = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1e9)]
Count = Annotated[int, BeforeValidator(_number), Field(ge=1, le=10**15)]
# Without control characters: it is printed on terminals.
ShownName = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]{1,200}$")]


def validated(model: type[Document], document: object, what: str) -> Document:
    """Return the document as the model has it; raises SettingsError with every problem."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise _refusal(what, problems_of(error, model)) from None


def refuse(what: str, problems: Sequence[str]) -> None:
    """Raise SettingsError where there are problems."""
    if problems:
        raise _refusal(what, problems)


def _refusal(what: str, problems: Sequence[str]) -> SettingsError:
    return SettingsError(f"{what} has {len(problems)} problem(s)", problems)
