"""``@value_class``: an immutable dataclass that is cheap to construct.

A frozen dataclass enforces immutability at run time. It sets each field through ``object.__setattr__``, which costs
three times as much as an assignment, and a worker constructs ten such objects per job. A value class is a dataclass
with slots that only type checkers treat as frozen: mypy and pyright reject assignments, as for
``@dataclass(frozen=True)``.

Use it only for classes on the hot path of a job; all others are frozen dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform, overload

__all__ = ["value_class"]

T = TypeVar("T")


@overload
def value_class(cls: type[T], /) -> type[T]: ...
@overload
def value_class(*, kw_only: bool) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value_class(cls: type[T] | None = None, /, *, kw_only: bool = False) -> type[T] | Callable[[type[T]], type[T]]:
    """Turn a class into a dataclass with slots that type checkers treat as frozen.

    Instances are compared and hashed by their fields.

    Args:
        cls: The class; omit it to pass options.
        kw_only: Make all fields keyword-only.
    """
    decorator = dataclass(slots=True, unsafe_hash=True, kw_only=kw_only)
    return decorator if cls is None else decorator(cls)
