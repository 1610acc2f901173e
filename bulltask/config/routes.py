"""The settings ``task_routes`` and ``task_queues``, in all of Celery's forms."""

from __future__ import annotations

import fnmatch
import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bulltask.config.parsers import parse_names, queue_name
from bulltask.errors import ConfigError

__all__ = ["Route", "Routes", "queue_names", "routes"]

Route = Mapping[str, Any]
"""A route: ``queue``, and any other option of a call."""

_Router = Callable[..., Any]
_FUNCTION: Final = re.compile(r"\w+(\.\w+)*[.:]\w+")
_AMQP_OPTIONS: Final = ("exchange", "exchange_type", "routing_key", "delivery_mode")


@dataclass(frozen=True, slots=True)
class _Table:
    """A router with task names and patterns; a name takes precedence over a pattern."""

    names: Mapping[str, Route]
    patterns: Sequence[tuple[re.Pattern[str], Route]]

    def find(self, task: str) -> Route | None:
        if task in self.names:
            return self.names[task]
        return next((route for pattern, route in self.patterns if pattern.match(task)), None)


@dataclass(frozen=True, slots=True)
class Routes:
    """The queues of jobs for which neither the call nor the task sets a queue.

    Attributes:
        routers: Tables and functions, in order; the first one with a route wins.
        calls_functions: Whether a route may depend on the arguments of a call.
    """

    routers: Sequence[_Table | _Router]
    calls_functions: bool

    def find(self, task: str, data: Any, options: Mapping[str, Any]) -> Route:
        """Return the route of a call, ``{}`` if there is none.

        Args:
            task: The task's name.
            data: The arguments, by name or as a list, for functions.
            options: The options of the call, for functions.

        Raises:
            ConfigError: A function returns an invalid route.
        """
        for router in self.routers:
            if isinstance(router, _Table):
                route = router.find(task)
            else:
                route = _route(_call(router, task, data, options), f"task_routes for {task}")
            if route:
                return route
        return {}

    def queues(self, tasks: Iterable[str]) -> list[str]:
        """Return the queues of these tasks according to the tables; those of functions depend on the calls."""
        tables = [router for router in self.routers if isinstance(router, _Table)]
        found = (next(filter(None, (table.find(task) for table in tables)), {}) for task in tasks)
        return list(dict.fromkeys(route["queue"] for route in found if "queue" in route))


def routes(value: Any, name: str) -> Routes | None:
    """Return the routers of ``task_routes``, or ``None`` if there are none.

    Args:
        value: One of the following, or a list of them: a dictionary of routes by task name or pattern (``"feed.*"``, or
            a compiled regular expression); a list of pairs of these; a function ``(name, args, kwargs, options,
            task=None, **_)`` that returns a route or ``None``; a function's name. A route is a queue's name, or a
            dictionary with ``queue`` and other options.
        name: Name of the setting, for the message.

    Raises:
        ConfigError: The value is invalid.
    """
    if value is None or value in ((), [], {}):
        return None
    parts = value if isinstance(value, list | tuple) and not _is_pairs(value) else [value]
    routers = [_router(part, name) for part in parts]
    return Routes(routers, any(not isinstance(router, _Table) for router in routers))


def queue_names(value: Any, name: str) -> tuple[str, ...]:
    """Return queue names, from names, dictionary keys or objects with a ``name`` such as ``kombu.Queue``.

    Raises:
        ConfigError: The value is invalid; ``name`` identifies it in the message.
    """
    if value is not None and not isinstance(value, str | Iterable):
        raise ConfigError(f"{name} must be a list of queue names, not {value!r:.200}")
    parts = value if isinstance(value, str) else [getattr(part, "name", part) for part in value or ()]
    return tuple(queue_name(part, name) for part in (parse_names(parts, name) if isinstance(parts, str) else parts))


def _router(value: Any, name: str) -> _Table | _Router:
    if isinstance(value, Mapping) or _is_pairs(value):
        names, patterns = {}, []
        for key, given in value.items() if isinstance(value, Mapping) else value:
            route = _route(given, f"{name}[{getattr(key, 'pattern', key)!r:.200}]")
            if isinstance(key, re.Pattern):
                patterns.append((key, route))
            elif not isinstance(key, str):
                raise ConfigError(f"{name} must have task names or patterns as keys, not {key!r:.200}")
            elif "*" in key:
                patterns.append((re.compile(fnmatch.translate(key)), route))
            else:
                names[key] = route
        return _Table(names, patterns)
    if isinstance(value, str) and _FUNCTION.fullmatch(value):
        return _LazyFunction(value)
    if callable(value) or hasattr(value, "route_for_task"):
        router: _Router = value
        return router
    raise ConfigError(f"{name} must be a dictionary of routes, a list of pairs or a function, not {value!r:.200}")


def _is_pairs(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str | re.Pattern) for pair in value
    )


def _route(value: Any, what: str) -> Route:
    """Return a route from its forms; ``{}`` from ``None``."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        value = {"queue": value}
    route = {key: part for key, part in value.items() if key not in _AMQP_OPTIONS}
    if "queue" in route:
        route["queue"] = queue_name(getattr(route["queue"], "name", route["queue"]), f"queue in {what}")
    elif len(route) < len(value):
        raise ConfigError(f"{what} has no queue; Redis has no exchanges or routing keys, so name the queue")
    return route


def _call(router: Any, task: str, data: Any, options: Mapping[str, Any]) -> object:
    args, kwargs = ((), data) if isinstance(data, Mapping) else (data or (), {})
    if hasattr(router, "route_for_task"):
        return router.route_for_task(task, args, kwargs)
    return router(task, args, kwargs, options, task=None)


class _LazyFunction:
    """A function that is imported when it is first called, because the settings are often read before it exists."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._function: _Router | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        if self._function is None:
            module_name, _, attribute = self._path.replace(":", ".").rpartition(".")
            try:
                self._function = getattr(importlib.import_module(module_name), attribute)
            except (ImportError, AttributeError, ValueError) as exc:
                raise ConfigError(f"task_routes names {self._path!r:.200}, which cannot be imported: {exc}") from exc
        return self._function(*args, **kwargs)
