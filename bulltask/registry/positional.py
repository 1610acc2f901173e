"""Protocols for tasks by number of positional parameters, for methods that take the arguments of several calls.

Python's type system has no type for "tuples of the positional arguments of a ``ParamSpec``", so there is one protocol
for each number of parameters. A task with optional parameters matches several protocols.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never, Protocol, TypeVar

__all__ = ["Takes1", "Takes1To2", "Takes1To3", "Takes2", "Takes2To3", "Takes3", "TakesMany", "Unchecked"]

A_contra = TypeVar("A_contra", contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)


class Takes1(Protocol[A_contra]):
    """A task that can be called with one positional argument."""

    def delay(self, first: A_contra, /) -> Any:
        """Send a call."""
        ...


class Takes2(Protocol[A_contra, B_contra]):
    """A task that can be called with two positional arguments."""

    def delay(self, first: A_contra, second: B_contra, /) -> Any:
        """Send a call."""
        ...


class Takes3(Protocol[A_contra, B_contra, C_contra]):
    """A task that can be called with three positional arguments."""

    def delay(self, first: A_contra, second: B_contra, third: C_contra, /) -> Any:
        """Send a call."""
        ...


class Takes1To2(Protocol[A_contra, B_contra]):
    """A task that can be called with one and with two positional arguments."""

    def delay(self, first: A_contra, /) -> Any:
        """Send a call."""
        ...

    def adelay(self, first: A_contra, second: B_contra, /) -> Any:
        """Send a call; this method and ``delay`` have the same parameters."""
        ...


class Takes1To3(Protocol[A_contra, B_contra, C_contra]):
    """A task that can be called with one to three positional arguments."""

    def delay(self, first: A_contra, /) -> Any:
        """Send a call."""
        ...

    def adelay(self, first: A_contra, second: B_contra, third: C_contra, /) -> Any:
        """Send a call; this method and ``delay`` have the same parameters."""
        ...


class Takes2To3(Protocol[A_contra, B_contra, C_contra]):
    """A task that can be called with two and with three positional arguments."""

    def delay(self, first: A_contra, second: B_contra, /) -> Any:
        """Send a call."""
        ...

    def adelay(self, first: A_contra, second: B_contra, third: C_contra, /) -> Any:
        """Send a call; this method and ``delay`` have the same parameters."""
        ...


class TakesMany(Protocol):
    """A task that can be called with four positional arguments or more, whose types are not checked."""

    def delay(self, first: Any, second: Any, third: Any, fourth: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Send a call."""
        ...


Unchecked = list[Any] | Sequence[Never]
"""A row whose items are not checked: a list, an empty tuple, or a sequence of ``Any``."""
