"""Lua scripts by name: BullMQ's (``official``) and bulltask's, each checked against its hash.

The number of keys is part of a script's file name (``moveToActive-11.lua`` takes 11 keys), as in BullMQ.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from bulltask.jobs.clock import value_class
from bulltask.jobs.errors import ScriptIntegrityError

__all__ = ["Script", "all_scripts", "bulltask_script", "official_script", "sha1"]

_FIX = "reinstall bulltask (in a checkout: pip install -e .)"
_FIX_BULLTASK = "reinstall bulltask (in a checkout, to accept your change: python tests/unit/test_lua_scripts.py)"


@value_class
class Script:
    """A Lua script.

    Attributes:
        name: The name without the key count, for instance ``moveToActive``.
        sha: The SHA-1 of the source in hex, which identifies the script in Redis' cache (``EVALSHA``).
        by_sha, by_source: The commands that run the script by its hash, and by its source.
    """

    name: str
    key_count: int
    source: bytes
    sha: str
    by_sha: str = "EVALSHA"
    by_source: str = "EVAL"

    def read_only(self) -> Script:
        """Return the same script with commands that reject writes; a read-only user may run these commands.

        Requires Redis 7.0 or newer.
        """
        return replace(self, by_sha="EVALSHA_RO", by_source="EVAL_RO")


@cache
def official_script(name: str) -> Script:
    """Return one of BullMQ's scripts by its name (``"moveToActive"``); the first call reads the file and checks it.

    ``ScriptIntegrityError``: the file is missing or altered, or the manifest has no script with that name.
    """
    return _load("official", name, _official_hashes(), "manifest.json", _FIX)


@cache
def bulltask_script(name: str) -> Script:
    """Return one of bulltask's scripts, ``bulltask/lua/bulltask/NAME-N.lua`` with N keys; the first call checks it."""
    return _load("bulltask", name, _bulltask_hashes(), "bulltask_scripts.json", _FIX_BULLTASK)


def all_scripts() -> list[Script]:
    """Read and check all scripts of BullMQ and bulltask; later calls in this process do not read the files again."""
    sources = ((official_script, _official_hashes()), (bulltask_script, _bulltask_hashes()))
    return [load(file_name.rpartition("-")[0]) for load, file_names in sources for file_name in sorted(file_names)]


def _load(folder: str, name: str, hashes: dict[str, str], hashes_file: str, fix: str) -> Script:
    file_name = _find_file(name, list(hashes), hashes_file)
    path = _file(folder) / file_name
    try:
        source = path.read_bytes()
    except (OSError, KeyError) as error:  # KeyError: a zip has no such file
        raise ScriptIntegrityError(f"{path} cannot be read ({error}): {fix}") from error
    actual = hashlib.sha256(source).hexdigest()
    if actual != hashes[file_name]:
        # A script that differs by one byte may corrupt every queue it touches, so it must not run.
        raise ScriptIntegrityError(f"{path} was altered (sha256 {actual}, not {hashes[file_name]}): {fix}")
    return _script(file_name, source)


@cache
def _official_hashes() -> dict[str, str]:
    scripts: dict[str, str] = json.loads(_file("manifest.json").read_bytes())["scripts"]
    return scripts


@cache
def _bulltask_hashes() -> dict[str, str]:
    scripts: dict[str, str] = json.loads(_file("bulltask_scripts.json").read_bytes())
    return scripts


def _file(name: str) -> Traversable:
    """Return a file or directory of this package; not a path, because Spark's executors may have bulltask as a zip.

    The result is not cached: forked processes would share an open zip file and its position.
    """
    return files("bulltask.lua") / name


def _find_file(name: str, file_names: list[str], hashes_file: str) -> str:
    matches = [file_name for file_name in file_names if file_name.rpartition("-")[0] == name]
    if len(matches) != 1:
        raise ScriptIntegrityError(f"{_file(hashes_file)} has {len(matches)} scripts named {name!r}, not one: {_FIX}")
    return matches[0]


def _script(file_name: str, source: bytes) -> Script:
    name, _, keys = file_name.removesuffix(".lua").rpartition("-")
    return Script(name, int(keys), source, sha1(source))


def sha1(source: bytes) -> str:
    """Return the SHA-1 of a script in hex, which identifies the script in Redis' cache."""
    return hashlib.sha1(source, usedforsecurity=False).hexdigest()
