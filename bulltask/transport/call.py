"""A call to Redis as a value, which the sync and the async client send in the same way.

Every script has one function in ``transport/scripts`` that builds its :class:`Call`. The two clients only send calls,
so the protocol is implemented once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar

import hiredis
import msgpack

from bulltask.errors import EncodeError
from bulltask.jobs.codec import ON_SURROGATE
from bulltask.lua import wrappers
from bulltask.lua.loader import Script
from bulltask.value_class import value_class

__all__ = [
    "AllNodesCall",
    "Arg",
    "Call",
    "PackedCall",
    "as_is",
    "command",
    "is_wait_for_replicas",
    "packed_chunks",
    "packed_with_sources",
    "script_call",
    "to_msgpack",
]

# hiredis's type stub declares wrong types for the arguments and the result.
_hiredis_pack: Callable[[tuple[Arg, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]

_LARGEST: Final = sys.float_info.max
_CACHED_KEYS: Final = 11
"""How many of a script's first keys are cached in packed form; ``moveToFinished``'s twelfth key contains a job id."""

_FIRST_CHUNK_BYTES: Final = 8_192
"""A few jobs, so that Redis starts early; each chunk is twice as long as the one before."""
_CHUNK_BYTES: Final = 65_536
"""About a hundred small jobs; smaller chunks need more system calls."""

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Arg = bytes | str | int | float


def as_is(reply: Any) -> Any:
    """Return the reply unchanged: the default parser."""
    return reply


@value_class
class Call(Generic[R_co]):
    """One command or script call.

    Attributes:
        args: A command and its arguments; for a script what follows its hash (key count, keys, arguments).
        parse_reply: Converts the raw reply to the result, or raises the error for a negative error code.
        script: The script to run, ``None`` for a plain command.
        cached: Number of trailing arguments of a plain command that many calls have in common; they are cached in
            packed form.
    """

    args: tuple[Arg, ...]
    parse_reply: Callable[[Any], R_co]
    script: Script | None = None
    cached: int = 0

    @property
    def keys(self) -> tuple[Arg, ...]:
        """The keys of a script call (``KEYS``)."""
        assert self.script is not None
        return self.args[1 : self.script.key_count + 1]

    @property
    def argv(self) -> tuple[Arg, ...]:
        """The arguments of a script call (``ARGV``)."""
        assert self.script is not None
        return self.args[self.script.key_count + 1 :]

    def packed(self) -> bytes:
        """Return the bytes to send: ``EVALSHA``, or the plain command."""
        if self.script is None:
            if not self.cached:
                return _pack(self.args)
            first = len(self.args) - self.cached
            uncached, cached = _pack_without_count(self.args[:first]), _pack_cached(self.args[first:])
            return b"*%d\r\n%b%b" % (len(self.args), uncached, cached)
        first = min(self.script.key_count, _CACHED_KEYS) + 1
        cached = _pack_cached((self.script.by_sha, self.script.sha, *self.args[:first]))
        return b"*%d\r\n%b%b" % (len(self.args) + 2, cached, _pack_without_count(self.args[first:]))

    @property
    def known_sha(self) -> str | None:
        """The hash of the script, if :meth:`packed_with_source` knows its source; ``None`` for a plain command."""
        return None if self.script is None else self.script.sha

    def packed_with_source(self) -> bytes:
        """Return the bytes to send when the server does not have the script: ``EVAL`` runs and caches it."""
        assert self.script is not None
        return _pack((self.script.by_source, self.script.source, *self.args))


class AllNodesCall(Call[R]):
    """A call without keys that a cluster makes on every node that has slots. On a single server, it is a normal call.

    Args:
        call: The call.
        merge: Returns the result, given the results of all nodes.
    """

    __slots__ = ("merge",)

    def __init__(self, call: Call[R], merge: Callable[[list[R]], R]) -> None:
        super().__init__(call.args, call.parse_reply)
        self.merge = merge


class PackedCall(Call[Any]):
    """A call that another process has packed. Its result is the raw reply.

    Args:
        packed: The bytes of a script call, or of a command whose first argument is its key.

    Attributes:
        args: The command and its arguments up to the first key, by which the call is routed in a cluster.
    """

    __slots__ = ("_packed",)

    def __init__(self, packed: bytes) -> None:
        # *COUNT $LENGTH EVALSHA $LENGTH SHA $LENGTH KEY-COUNT $LENGTH KEY …, each on a line
        args = packed.split(b"\r\n", 9)[2:9:2]
        super().__init__(tuple(arg.decode("utf-8", ON_SURROGATE) for arg in args), as_is)
        self._packed = packed

    @property
    def known_sha(self) -> str | None:
        """The hash of the script, if it is one of :func:`bulltask.lua.wrappers.outcome_scripts`."""
        sha = str(self.args[1])
        return sha if sha in wrappers.outcome_scripts() else None

    def packed(self) -> bytes:
        """Return the bytes to send."""
        return self._packed

    def packed_with_source(self) -> bytes:
        """Return the same bytes with ``EVAL`` and the script's source in place of ``EVALSHA`` and its hash."""
        script = wrappers.outcome_scripts()[str(self.args[1])]
        count, _, _, _, _, rest = self._packed.split(b"\r\n", 5)
        return b"%b\r\n%b%b" % (count, _pack_without_count((script.by_source, script.source)), rest)


def _pack(args: tuple[Arg, ...]) -> bytes:
    try:
        return _hiredis_pack(args)
    except UnicodeEncodeError:
        # An id from another client may not be UTF-8, so it is sent as it was received (see replies.text).
        encoded = (arg.encode("utf-8", ON_SURROGATE) if isinstance(arg, str) else arg for arg in args)
        return _hiredis_pack(tuple(encoded))


def _pack_without_count(args: tuple[Arg, ...]) -> bytes:
    return _pack(args).partition(b"\r\n")[2]


# Half of a script call's arguments are the same in all calls for a queue. Packing them for each call would take 3 to 5%
# of a send's instructions, and 4% of a job's.
_pack_cached = lru_cache(maxsize=500)(_pack_without_count)


def packed_with_sources(calls: Sequence[Call[Any]]) -> list[bytes]:
    """Return the bytes to send when the server does not have the calls' scripts; each script's source is sent once.

    Plain commands are sent unchanged.

    Later calls of a script find it loaded by the first one. Another ``SCRIPT FLUSH`` may come in between, but every
    round trip executes at least the calls that contain the source.
    """
    seen: set[str | None] = {None}
    packed = []
    for call in calls:
        packed.append(call.packed() if call.known_sha in seen else call.packed_with_source())
        seen.add(call.known_sha)
    return packed


def packed_chunks(calls: Iterable[Call[Any]], made: list[Call[Any]]) -> Iterator[list[bytes]]:
    """Pack calls in chunks that are worth a system call, while ``calls`` builds them; append each call to ``made``."""
    chunk: list[bytes] = []
    size, enough = 0, _FIRST_CHUNK_BYTES
    for call in calls:
        made.append(call)
        chunk.append(packed := call.packed())
        size += len(packed)
        if size >= enough:
            yield chunk
            chunk, size, enough = [], 0, min(2 * enough, _CHUNK_BYTES)
    if chunk:
        yield chunk


def is_wait_for_replicas(call: Call[Any]) -> bool:
    """Return whether the call is a ``WAIT``, which covers what its connection has written before it."""
    return call.args[0] == "WAIT"


def command(*args: Arg, parse_reply: Callable[[Any], R] = as_is) -> Call[R]:
    """Build the call for a plain command."""
    return Call(args, parse_reply)


def script_call(
    script: Script, keys: tuple[Arg, ...], args: tuple[Arg, ...], parse_reply: Callable[[Any], R] = as_is
) -> Call[R]:
    """Build the call for a script.

    Raises:
        TypeError: The number of keys differs from the number in the script's file name.
    """
    if len(keys) != script.key_count:
        raise TypeError(f"script {script.name} takes {script.key_count} keys, not {len(keys)}")
    return Call((script.key_count, *keys, *args), parse_reply, script)


def to_msgpack(value: object) -> bytes:
    """Return ``value`` as MessagePack for BullMQ's scripts; it may contain any value that another client has stored.

    Integers of more than 64 bits become floats, as in Node. Bytes become strings, because Redis cannot read
    MessagePack's type for bytes.

    Raises:
        EncodeError: The value cannot be packed, for example because it is nested too deeply.
    """
    try:
        packed: bytes = msgpack.packb(value, default=_as_float, unicode_errors=ON_SURROGATE, use_bin_type=False)
    except (ValueError, TypeError, OverflowError, RecursionError) as exc:
        raise EncodeError(f"options cannot be packed for Redis: {exc}") from exc
    return packed


def _as_float(value: object) -> float:
    if not isinstance(value, int):
        raise TypeError(f"a value of type {type(value).__name__}")
    return float(max(-_LARGEST, min(value, _LARGEST)))
