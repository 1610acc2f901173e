"""Conversion between a Python call and the JSON that a Node developer would write.

``add.delay(1, y=2)`` on ``def add(x, y)`` is stored as ``{"x": 1, "y": 2}``. ``*args`` and ``**kwargs`` are stored
under their parameters' names. If another client stores a JSON array, its items are positional arguments; any other
value that is not an object is the only argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from bulltask.errors import InvalidJobError, incompatible

__all__ = ["Arguments", "check_args", "check_items", "check_kwargs"]

_Kind = inspect.Parameter
_LATER: Final = object()
"""Placeholder for an argument that is not known yet."""


def check_args(args: Any, task: str) -> Sequence[Any]:
    """Return a call's positional arguments; a string, bytes or a dictionary would be taken for several.

    Raises:
        TypeError: They are not a list or tuple.
    """
    if args is None:
        return ()
    if not isinstance(args, Sequence) or isinstance(args, str | bytes | bytearray | memoryview):
        raise TypeError(f"the positional arguments of {task} must be a list or tuple, not {args!r:.200}")
    return args


def check_kwargs(kwargs: Any, task: str) -> Mapping[str, Any]:
    """Return a call's keyword arguments.

    Raises:
        TypeError: They are not a dictionary.
    """
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"the keyword arguments of {task} must be a dictionary, not {kwargs!r:.200}")
    return kwargs


def check_items(items: Any, what: str) -> Iterable[Any]:
    """Return the items of several calls.

    Raises:
        TypeError: They are a string, bytes or a dictionary, or cannot be iterated over.
    """
    if not isinstance(items, Iterable) or isinstance(items, str | bytes | bytearray | memoryview | Mapping):
        raise TypeError(f"{what} takes a list or another iterable of items, not {items!r:.200}")
    return items


class Arguments:
    """A task function's signature.

    Args:
        function: The function.
        task: The task's name, for messages.
        skip_first: The first parameter is the context (``bind=True``), not an argument.

    Attributes:
        signature: The signature of a call.
    """

    def __init__(self, function: Callable[..., Any], task: str, *, skip_first: bool) -> None:
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[1 if skip_first else 0 :]
        self._task = task
        self.signature = signature.replace(parameters=parameters)
        self._signature = self.signature.replace(return_annotation=inspect.Signature.empty)
        by_kind: dict[Any, list[str]] = {}
        for parameter in parameters:
            by_kind.setdefault(parameter.kind, []).append(parameter.name)
        self._positional_only = by_kind.get(_Kind.POSITIONAL_ONLY, [])
        self._positional_or_keyword = by_kind.get(_Kind.POSITIONAL_OR_KEYWORD, [])
        self._var_args = next(iter(by_kind.get(_Kind.VAR_POSITIONAL, [])), None)
        self._var_kwargs = next(iter(by_kind.get(_Kind.VAR_KEYWORD, [])), None)
        self._names = frozenset(parameter.name for parameter in parameters)
        self._required = frozenset(parameter.name for parameter in parameters if parameter.default is _Kind.empty)
        self._by_name = not self._positional_only and self._var_args is None and self._var_kwargs is None

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the call's arguments by parameter name, without omitted arguments.

        Raises:
            TypeError: The arguments do not match the signature; the message is Python's.
        """
        if type(args) is not tuple:
            args = check_args(args, self._task)
        if self._by_name and not kwargs and len(args) <= len(self._positional_or_keyword):
            data = dict(zip(self._positional_or_keyword, args, strict=False))
            if self._required <= data.keys():
                return data  # nearly every call; the full check takes several times as long
        kwargs = check_kwargs(kwargs, self._task)
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise TypeError(f"{self._task}() {self._explained(exc, kwargs)}") from None
        data = dict(bound.arguments)
        if self._var_args in data:
            data[self._var_args] = list(data[self._var_args])
        return data

    def bind_partial(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Like :meth:`bind`, but any arguments may be missing, because they are not known yet or may have any value.

        Raises:
            TypeError: There are too many arguments, or no parameter has such a name.
        """
        try:
            data = dict(self._signature.bind_partial(*args, **kwargs).arguments)
        except TypeError as exc:
            raise TypeError(f"{self._task}() {exc}") from None
        return {name: list(value) if name == self._var_args else value for name, value in data.items()}

    def bind_after(
        self, count: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[str]]:
        """Bind a call whose first positional arguments are not known yet, such as the result of another call.

        Args:
            count: The number of arguments that come before ``args``.
            args, kwargs: The other arguments.

        Returns:
            The other arguments by parameter name, and the names of the parameters that will receive the first ones.
            One of them may be ``*args``, for which the arguments already contain a list; the value is inserted before
            the items of that list.

        Raises:
            TypeError: The arguments, with those that are not known yet, do not match the signature.
        """
        data = self.bind((*[_LATER] * count, *args), kwargs)
        names = [name for name, value in data.items() if value is _LATER]
        if self._var_args and (rest := data.get(self._var_args)):
            names += [self._var_args] * rest.count(_LATER)
            data[self._var_args] = [value for value in rest if value is not _LATER]
        return {name: value for name, value in data.items() if value is not _LATER}, names

    def unbind(self, data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return stored data as positional and keyword arguments that match the signature.

        Raises:
            InvalidJobError: The data does not match; the message names the task and the argument.
        """
        if self._by_name and type(data) is dict and self._required <= data.keys() <= self._names:
            return (), data  # nearly every job; the full check takes several times as long
        args, kwargs = self._split(data)
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise self._mismatch(self._explained(exc, kwargs)) from None
        return args, kwargs

    def _explained(self, exc: TypeError, kwargs: Mapping[str, Any]) -> str:
        """Return Python's message; about a missing argument, it does not say which names are wrong."""
        unknown = [] if self._var_kwargs else [repr(name) for name in kwargs if name not in self._names]
        if unknown and "missing" in str(exc):
            return f"{exc}, and got an unexpected keyword argument {', '.join(unknown)}"
        return str(exc)

    def _split(self, data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if data is None:
            return (), {}
        if isinstance(data, list):
            return tuple(data), {}
        if not isinstance(data, dict):
            return (data,), {}
        return ((), data) if self._by_name else self._split_mapping(dict(data))

    def _split_mapping(self, left: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = list(self._positional_only)
        more = left.pop(self._var_args, None) if self._var_args else None
        if more:
            names += self._positional_or_keyword  # they precede *args, so they can only be passed by position
        while names and not more and names[-1] not in left:
            names.pop()
        args = [left.pop(name) if name in left else self._default(name) for name in names]
        if more:
            args += more if isinstance(more, list) else [more]
        packed = left.pop(self._var_kwargs, None) if self._var_kwargs else None
        if isinstance(packed, dict):
            left = {**left, **packed}
        elif packed is not None and self._var_kwargs:
            left[self._var_kwargs] = packed
        return tuple(args), left

    def _default(self, name: str) -> Any:
        """Return the default of a parameter that is missing from the data, although a later parameter is present."""
        default = self._signature.parameters[name].default
        if default is _Kind.empty:
            raise self._mismatch(f"missing a required argument: {name!r}")
        return default

    def _mismatch(self, problem: object) -> InvalidJobError:
        return incompatible(InvalidJobError(f"the job's data does not match {self._task}{self._signature}: {problem}"))
