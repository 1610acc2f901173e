"""Lua scripts by name: BullMQ's and bulltask's own, each checked against its hash.

The number of keys is part of a script's file name (``moveToActive-11.lua`` takes 11 keys), as in BullMQ.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from bulltask.errors import ScriptIntegrityError

__all__ = ["Script", "every", "official", "own", "sha1"]

_CURE = "reinstall bulltask (in a checkout: pip install -e .)"
_CURE_OWN = "reinstall bulltask (in a checkout, to accept your change: python tests/unit/test_lua_scripts.py)"


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script.

    Attributes:
        name: its name without key count, for instance ``moveToActive``.
        key_count: number of keys it takes.
        body: its text.
        sha: SHA-1 of the text in hex, under which Redis caches it (``EVALSHA``).
        by_sha: the command that runs it by that hash.
        by_body: the command that runs its text.
    """

    name: str
    key_count: int
    body: bytes
    sha: str
    by_sha: str = "EVALSHA"
    by_body: str = "EVAL"

    def only_reading(self) -> Script:
        """Return the same script, run so that the server prevents writes; a read-only user may then run it.

        Requires Redis 7.0 or newer.
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
    """Return one of bulltask's own scripts, ``bulltask/lua/own/NAME-KEYS.lua``; the first call checks it.

    Raises:
        ScriptIntegrityError: as in :func:`official`; the hashes are in ``own_scripts.json``.
    """
    return _checked("own", name, _pins(), "own_scripts.json", _CURE_OWN)


def every() -> list[Script]:
    """Return all scripts of BullMQ and bulltask. After this call none can turn out to be altered.

    Raises:
        ScriptIntegrityError: as in :func:`official` and :func:`own`.
    """
    sources = ((official, _manifest()), (own, _pins()))
    return [load(file_name.rpartition("-")[0]) for load, file_names in sources for file_name in sorted(file_names)]


def _checked(folder: str, name: str, wanted: dict[str, str], where: str, cure: str) -> Script:
    file_name = _only_file(name, list(wanted), _file(where))
    path = _file(folder) / file_name
    try:
        body = path.read_bytes()
    except (OSError, KeyError) as error:  # KeyError: a zip has no such file
        raise ScriptIntegrityError(f"{path} cannot be read ({error}): {cure}") from error
    found = hashlib.sha256(body).hexdigest()
    if found != wanted[file_name]:
        # A script that differs by one byte may corrupt every queue it touches, so it must not run.
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
    """Return a file or directory beside this one; not a path, because Spark's executors may have bulltask as a zip.

    It is not cached: forked processes would share an open zip, and read it at each other's position.
    """
    return files("bulltask.lua") / name


def _only_file(name: str, file_names: list[str], where: Traversable) -> str:
    matches = [file_name for file_name in file_names if file_name.rpartition("-")[0] == name]
    if len(matches) != 1:
        raise ScriptIntegrityError(f"{where} has {len(matches)} scripts named {name!r}, not one: {_CURE}")
    return matches[0]


def _script(file_name: str, body: bytes) -> Script:
    name, _, keys = file_name.removesuffix(".lua").rpartition("-")
    return Script(name, int(keys), body, sha1(body))


def sha1(body: bytes) -> str:
    """Return the SHA-1 of a script in hex: the name under which Redis caches it."""
    return hashlib.sha1(body, usedforsecurity=False).hexdigest()
