"""Checks the plain arguments of a class's methods: flags, numbers and strings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from bulltask.errors import ConfigError

__all__ = ["checked"]

C = TypeVar("C")

_KINDS: Final[dict[str, tuple[type[bool] | type[int] | type[str], str]]] = {
    "bool": (bool, "true or false"),
    "int": (int, "an integer"),
    "str": (str, "a string"),
}
_NOT_NEGATIVE: Final = frozenset(("count", "limit", "keep", "keep_logs", "max_jobs", "max_length"))


class _Rule(NamedTuple):
    kind: type[bool] | type[int] | type[str]
    what: str
    optional: bool

    def check(self, name: str, value: Any) -> None:
        """Raise ``ConfigError`` for an invalid value."""
        if value is None and self.optional:
            return
        if not isinstance(value, self.kind) or (self.kind is int and isinstance(value, bool)):
            raise ConfigError(f"{name} must be {self.what}, not {value!r:.200}")
        if isinstance(value, int) and name in _NOT_NEGATIVE and value < 0:
            raise ConfigError(f"{name} must be 0 or more, not {value}")


def checked(kind: type[C]) -> type[C]:
    """Return the class; its public methods raise ``ConfigError`` for arguments that do not match their plain hints.

    Otherwise ``force="false"`` would be true, and Redis would report ``count="x"`` as an error in a script. Only
    parameters with the hints ``bool``, ``int`` and ``str``, or one of them and ``None``, are checked, and generators
    check their arguments themselves.
    """
    for name, method in list(vars(kind).items()):
        is_generator = inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)
        if inspect.isfunction(method) and not (name.startswith("_") or is_generator):
            setattr(kind, name, _checked(method))
    return kind


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    names, rules = list(inspect.signature(method).parameters), _rules(method)
    if not rules:
        return method

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if name in rules:
                rules[name].check(name, value)

    @functools.wraps(method)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return await method(*args, **kwargs)

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return method(*args, **kwargs)

    return coroutine if inspect.iscoroutinefunction(method) else function


def _rules(method: Callable[..., Any]) -> dict[str, _Rule]:
    rules: dict[str, _Rule] = {}
    for name, parameter in inspect.signature(method).parameters.items():
        hint, _, optional = str(parameter.annotation).partition(" | ")
        if hint in _KINDS and optional in {"", "None"} and parameter.kind is not parameter.VAR_POSITIONAL:
            rules[name] = _Rule(*_KINDS[hint], bool(optional))
    return rules
