"""Stamps: labels of the calls in a canvas, which a visitor chooses, and which their tasks receive (as in Celery)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # canvas.py imports this module
    from bulltask.registry.canvas import Canvas

__all__ = ["STAMPED_HEADERS", "Stamper", "StampingVisitor", "headers_with_stamps", "with_stamps"]

STAMPED_HEADERS: Final = "stamped_headers"
"""What lists the names of stamps: in the headers of a job, and among a visitor's headers."""

_STAMPS: Final = "stamps"

Headers = Mapping[str, Any]


class StampingVisitor(ABC):
    """Chooses the stamps of each part of a canvas; :meth:`Canvas.stamp` calls its methods.

    A method returns headers for that part and for all parts in it. All of them are stamps, unless the headers contain
    ``stamped_headers``, a list of the names of those that are. The others are only passed to the methods that are
    called for the parts inside.

    Each method receives the headers that apply to the part so far, as keyword arguments.
    """

    @abstractmethod
    def on_signature(self, sig: Any, **headers: Any) -> Headers | None:
        """Return the headers of a call; called for each task in the canvas and for each callback."""

    def on_group_start(self, group: Any, **headers: Any) -> Headers | None:  # noqa: ARG002 - to be overridden
        """Return the headers of a group, before its members."""
        return {}

    def on_group_end(self, group: Any, **headers: Any) -> None:  # noqa: B027 - to be overridden if wanted
        """Called after the members of a group."""

    def on_chain_start(self, chain: Any, **headers: Any) -> Headers | None:  # noqa: ARG002
        """Return the headers of a chain, before its steps."""
        return {}

    def on_chain_end(self, chain: Any, **headers: Any) -> None:  # noqa: B027
        """Called after the steps of a chain."""

    def on_chord_header_start(self, sig: Any, **headers: Any) -> Headers | None:
        """Return the headers of a chord, before the members of its header; default: those of a group."""
        return self.on_group_start(sig.header, **headers)

    def on_chord_header_end(self, sig: Any, **headers: Any) -> None:
        """Called after the members of a chord's header."""
        self.on_group_end(sig.header, **headers)

    def on_chord_body(self, sig: Any, **headers: Any) -> Headers | None:  # noqa: ARG002
        """Return the headers of a chord's body; ``sig`` is the chord."""
        return {}

    def on_callback(self, callback: Any, **headers: Any) -> Headers | None:  # noqa: ARG002
        """Return the headers of a callback, before :meth:`on_signature` is called for it."""
        return {}

    def on_errback(self, errback: Any, **headers: Any) -> Headers | None:  # noqa: ARG002
        """Return the headers of an error callback, before :meth:`on_signature` is called for it."""
        return {}


class Stamper:
    """One call of :meth:`Canvas.stamp`; with ``append``, an existing stamp becomes a list of all values."""

    def __init__(self, visitor: StampingVisitor | None = None, *, append: bool = False) -> None:
        self._visitor = visitor
        self._append = append

    def headers(self, method: str, part: Canvas[Any, Any], headers: Headers) -> dict[str, Any]:
        """Return the headers of a part: those that apply already, and those that a method of the visitor returns."""
        found = None if self._visitor is None else getattr(self._visitor, method)(part, **headers)
        return self.merged(headers, found or {})

    def merged(self, headers: Headers, more: Headers) -> dict[str, Any]:
        """Return all headers; ``more`` override the others, or are appended."""
        merged = dict(headers)
        for name, value in more.items():
            is_both = self._append and name in headers and name != STAMPED_HEADERS
            merged[name] = [*_listed(headers[name]), *_listed(value)] if is_both else value
        merged[STAMPED_HEADERS] = list(dict.fromkeys([*_names(headers), *_names(more)]))
        return merged

    def stamp_links(self, part: Any, headers: Headers) -> None:
        """Stamp the callbacks of a part, and its error callbacks."""
        for method, attribute in (("on_callback", "links"), ("on_errback", "errbacks")):
            for call in getattr(part, attribute, ()):
                call.stamp_with(self, self.headers(method, call, headers))

    def end(self, method: str, part: Canvas[Any, Any], headers: Headers) -> None:
        """Tell the visitor that all parts in this one are stamped."""
        if self._visitor is not None:
            getattr(self._visitor, method)(part, **headers)


def with_stamps(options: dict[str, Any]) -> dict[str, Any]:
    """Return a call's options, with Celery's option ``stamped_headers`` and the stamps that it names in ``stamps``."""
    names = options.pop(STAMPED_HEADERS, None) or ()
    stamps = {name: options.pop(name) for name in names if name in options}
    return {**options, _STAMPS: {**options.get(_STAMPS, {}), **stamps}} if stamps else options


def headers_with_stamps(options: dict[str, Any]) -> dict[str, Any]:
    """Return a call's options with the stamps among the headers, from which :class:`Request` reads them."""
    stamps = options.pop(_STAMPS, None)
    if not stamps:
        return options
    return {**options, "headers": {**(options.get("headers") or {}), _STAMPS: stamps, STAMPED_HEADERS: [*stamps]}}


def _names(headers: Headers) -> list[str]:
    found = headers.get(STAMPED_HEADERS)
    return list(headers) if found is None else list(found)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | set) else [value]
