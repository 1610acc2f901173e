"""Lua scripts by name: BullMQ's own and the few that bulltask adds, each checked against its hash.

The number of keys is part of a script's file name (``moveToActive-11.lua`` takes 11 keys), as BullMQ spells it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from bulltask.errors import ScriptIntegrityError

__all__ = ["Script", "ending", "every", "fenced", "guarded", "official", "own", "retrying", "waking"]

_CURE = "reinstall bulltask (in a checkout: pip install -e .)"
_CURE_OWN = "reinstall bulltask (in a checkout, if the change is meant: python tests/unit/test_lua_scripts.py)"


@dataclass(frozen=True, slots=True)
class Script:
    """One Lua script, ready to be run by its hash.

    Attributes:
        name: its name without key count, for instance ``moveToActive``.
        key_count: how many keys it takes.
        body: its text.
        sha: SHA-1 of the text in hex, the name under which Redis caches it (``EVALSHA``).
        by_sha: the command that runs it by that name.
        by_body: the command that runs its text.
    """

    name: str
    key_count: int
    body: bytes
    sha: str
    by_sha: str = "EVALSHA"
    by_body: str = "EVAL"

    def only_reading(self) -> Script:
        """The same script, run so that the server keeps it from writing: a user who may only read may run it then.

        From Redis 7.0 on.
        """
        return replace(self, by_sha="EVALSHA_RO", by_body="EVAL_RO")


@cache
def official(name: str) -> Script:
    """Return a script of BullMQ; the first call reads the file and checks it.

    Args:
        name: its name as BullMQ spells it, without the key count: ``"moveToActive"``.

    Raises:
        ScriptIntegrityError: the file is missing or altered, or the manifest has no script of that name.
    """
    return _checked("official", name, _manifest(), "manifest.json", _CURE)


@cache
def own(name: str) -> Script:
    """Return a script of bulltask's own, from ``bulltask/lua/own/NAME-KEYS.lua``; the first call checks it.

    Raises:
        ScriptIntegrityError: as of :func:`official`; the hashes are in ``own_scripts.json``.
    """
    return _checked("own", name, _pins(), "own_scripts.json", _CURE_OWN)


@cache
def fenced(name: str) -> Script:
    """Return an official add script behind the fence (``own/fence-1.lua``): one script that does both in one step.

    The official text stands in it byte for byte, as the body of a function whose parameters take the place of the
    ``KEYS`` and ``ARGV`` that it was written for.

    Raises:
        ScriptIntegrityError: as of :func:`official`.
    """
    return _around(own("fence"), official(name), b"add")


@cache
def ending(name: str) -> Script:
    """Return an own script that ends a job: BullMQ's ``moveToFinished`` stands in it as ``finish(KEYS, ARGV)``.

    As in :func:`fenced`, the official text is there byte for byte, and both are one step.

    Raises:
        ScriptIntegrityError: as of :func:`official` and :func:`own`.
    """
    return _around(own(name), official("moveToFinished"), b"finish")


@cache
def guarded(name: str, guard: str) -> Script:
    """Return an official script behind an own one that deals with malformed jobs, under the official name.

    As in :func:`fenced`, the official text is there byte for byte, as ``official(KEYS, ARGV)``, and both are one step.

    Args:
        name: the official script.
        guard: the own one.

    Raises:
        ScriptIntegrityError: as of :func:`official` and :func:`own`.
    """
    return replace(_around(own(guard), official(name), b"official"), name=name)


@cache
def retrying() -> Script:
    """Return own ``retryFailed``: BullMQ's ``moveJobsToWait`` stands in it as ``retry(KEYS, ARGV)``, byte for byte.

    Raises:
        ScriptIntegrityError: as of :func:`official`.
    """
    return _around(own("retryFailed"), official("moveJobsToWait"), b"retry")


@cache
def waking(script: Script) -> Script:
    """Return own ``wakeNext`` around a script that moves a job out of ``active``: it is there byte for byte, as
    ``move(KEYS, ARGV)``.

    Raises:
        ScriptIntegrityError: as of :func:`own`.
    """
    return _around(own("wakeNext"), script, b"move")


def every() -> list[Script]:
    """Return all scripts of BullMQ and all of our own: after this call none can be found altered.

    Raises:
        ScriptIntegrityError: as of :func:`official` and :func:`own`.
    """
    sources = ((official, _manifest()), (own, _pins()))
    return [load(file_name.rpartition("-")[0]) for load, file_names in sources for file_name in sorted(file_names)]


def _around(outer: Script, inner: Script, function: bytes) -> Script:
    body = b"local function " + function + b"(KEYS, ARGV)\n" + inner.body + b"\nend\n" + outer.body
    return Script(f"{outer.name}:{inner.name}", outer.key_count + inner.key_count, body, _sha(body))


def _checked(folder: str, name: str, wanted: dict[str, str], where: str, cure: str) -> Script:
    file_name = _only_file(name, list(wanted), _file(where))
    path = _file(folder) / file_name
    try:
        body = path.read_bytes()
    except (OSError, KeyError) as error:  # KeyError: a zip has no such file
        raise ScriptIntegrityError(f"{path} cannot be read ({error}): {cure}") from error
    found = hashlib.sha256(body).hexdigest()
    if found != wanted[file_name]:
        # A script that differs by one byte may corrupt every queue it touches, so nothing runs with it.
        raise ScriptIntegrityError(f"{path} was altered (sha256 {found}, not {wanted[file_name]}): {cure}")
    return _script(file_name, body)


@cache
def _manifest() -> dict[str, str]:
    scripts: dict[str, str] = json.loads(_file("manifest.json").read_bytes())["scripts"]
    return scripts


@cache
def _pins() -> dict[str, str]:
    scripts: dict[str, str] = json.loads(_file("own_scripts.json").read_bytes())
    return scripts


def _file(name: str) -> Traversable:
    """A file or directory beside this one: no path, as Spark's executors may have bulltask as a zip (``--py-files``).

    It is not kept: an open zip would be shared with forked processes, which would read it at each other's place.
    """
    return files("bulltask.lua") / name


def _only_file(name: str, file_names: list[str], where: Traversable) -> str:
    matches = [file_name for file_name in file_names if file_name.rpartition("-")[0] == name]
    if len(matches) != 1:
        raise ScriptIntegrityError(f"{where} has {len(matches)} scripts named {name!r}, not one: {_CURE}")
    return matches[0]


def _script(file_name: str, body: bytes) -> Script:
    name, _, keys = file_name.removesuffix(".lua").rpartition("-")
    return Script(name, int(keys), body, _sha(body))


def _sha(body: bytes) -> str:
    return hashlib.sha1(body, usedforsecurity=False).hexdigest()
