"""Own scripts around one of BullMQ's: two texts in one script, so that Redis runs both in one step.

BullMQ's text is included byte for byte, as the body of a local function whose parameters replace the ``KEYS`` and
``ARGV`` that it was written for. The own script calls that function.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from bulltask.lua.loader import Script, official, own, sha1

__all__ = ["ending", "fenced", "guarded", "retrying", "waking"]


@cache
def fenced(name: str) -> Script:
    """Return an official add script behind own ``fence``.

    Raises:
        ScriptIntegrityError: as in :func:`bulltask.lua.loader.official`.
    """
    return _around(own("fence"), official(name), b"add")


@cache
def ending(name: str) -> Script:
    """Return an own script that finishes a job: it calls BullMQ's ``moveToFinished`` as ``finish(KEYS, ARGV)``.

    Raises:
        ScriptIntegrityError: as in :func:`bulltask.lua.loader.official`.
    """
    return _around(own(name), official("moveToFinished"), b"finish")


@cache
def guarded(name: str, guard: str) -> Script:
    """Return an official script behind an own one that handles malformed jobs, under the official name.

    Args:
        name: the official script, which is called as ``official(KEYS, ARGV)``.
        guard: the own one.

    Raises:
        ScriptIntegrityError: as in :func:`bulltask.lua.loader.official`.
    """
    return replace(_around(own(guard), official(name), b"official"), name=name)


@cache
def retrying() -> Script:
    """Return own ``retryFailed``, which calls BullMQ's ``moveJobsToWait`` as ``retry(KEYS, ARGV)``.

    Raises:
        ScriptIntegrityError: as in :func:`bulltask.lua.loader.official`.
    """
    return _around(own("retryFailed"), official("moveJobsToWait"), b"retry")


@cache
def waking(script: Script) -> Script:
    """Return own ``wakeNext`` around a script that moves a job out of ``active``, called as ``move(KEYS, ARGV)``.

    Raises:
        ScriptIntegrityError: as in :func:`bulltask.lua.loader.own`.
    """
    return _around(own("wakeNext"), script, b"move")


def _around(outer: Script, inner: Script, function: bytes) -> Script:
    body = b"local function " + function + b"(KEYS, ARGV)\n" + inner.body + b"\nend\n" + outer.body
    return Script(f"{outer.name}:{inner.name}", outer.key_count + inner.key_count, body, sha1(body))
