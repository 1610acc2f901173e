"""Ids of jobs that come from rows: the same row of the same write is the same job, however often it is written."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Final

import uuid_utils

from bulltask.errors import ConfigError

__all__ = ["check_write_id", "derived_id", "new_write_id", "write_id_of_batch"]

_MOST: Final = 200
_UNFIT: Final = re.compile(r"[\x00-\x20\x7f{}\ud800-\udfff]")


def derived_id(write_id: str, queue: str, name: str, data: bytes, number: int = 0) -> str:
    """Return the id of the job that a row becomes: ``s`` and 24 hexadecimal digits.

    BullMQ takes no id that is a number or has a ``:`` (5.62), so a letter stands in front. Rows that are equal are
    the same job, unless they are numbered.

    Args:
        write_id: the write (:func:`check_write_id`).
        queue: the queue's name as BullMQ spells it, so that ``emails`` and ``{emails}`` are the same.
        name: the job's name.
        data: its data as it is sent: JSON without spaces and needless escapes. The order of keys counts, and so does
            whether a number is 1 or 1.0.
        number: which one it is among equal rows, from 0.
    """
    return "s" + hashlib.sha256(_head(write_id, queue, name, number) + data).hexdigest()[:24]


@lru_cache(maxsize=1_000)
def _head(write_id: str, queue: str, name: str, number: int) -> bytes:
    # None of these parts can have a control character, so the parts cannot run into each other.
    return f"{write_id}\0{queue}\0{name}\0{number or ''}\0".encode()


def new_write_id() -> str:
    """Return an id for a write that has none; they sort by time."""
    return uuid_utils.uuid7().hex


def write_id_of_batch(write: str, batch: str | int) -> str:
    """Return the write id of one batch of a stream.

    Args:
        write: the stream's own ``writeId``, or Spark's id of the query, which a checkpoint keeps.
        batch: its number, which Spark gives a batch that it runs again too.
    """
    return f"{write}-{batch}"


def check_write_id(write_id: str) -> str:
    """Return ``write_id`` if it may be part of a key in Redis.

    Raises:
        ConfigError: it is empty, over 200 characters, or has spaces, control characters or braces.
    """
    if not isinstance(write_id, str) or not write_id or len(write_id) > _MOST or _UNFIT.search(write_id):
        raise ConfigError(
            f"write id {write_id!r:.60} must be a text of 1 to {_MOST} characters without spaces, control characters "
            "and braces"
        )
    return write_id
