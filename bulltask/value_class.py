"""``@value_class``: a small class of fields that nobody changes, made often.

A frozen dataclass keeps that promise at run time, and pays for it whenever one is made: each field goes through
``object.__setattr__``, three times the cost of a plain assignment. A worker makes ten such objects for every job.
So here the type checkers keep the promise (``mypy`` and ``pyright`` refuse an assignment, as for
``@dataclass(frozen=True)``), and at run time it is a dataclass with slots.

For classes on the path of a job only; all others are frozen dataclasses.
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
    """Make a class a dataclass that is frozen for the type checkers; equal and hashed by its fields, with slots.

    Args:
        cls: the class; left out when there are options.
        kw_only: the fields are given by name.
    """
    made = dataclass(slots=True, unsafe_hash=True, kw_only=kw_only)
    return made if cls is None else made(cls)
