"""Fields of a job's hash, as a worker receives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bulltask.errors import DecodeError
from bulltask.jobs import codec
from bulltask.jobs.numbers import field_number

__all__ = ["check_parent", "read_int"]


def check_parent(raw: Mapping[bytes, bytes], job_id: str) -> None:
    """Check the fields ``parent`` and ``parentKey``, which BullMQ's scripts read when the job finishes.

    Raises:
        DecodeError: One of them is malformed.
    """
    parent = codec.decode_object(raw.get(b"parent", b"{}"), what=f"field parent of job {job_id}")
    # Node stores the id as the caller gave it, so it may be a number.
    if b"parent" in raw and not (isinstance(parent.get("id"), str | int) and isinstance(parent.get("queueKey"), str)):
        raise DecodeError(f"field parent of job {job_id} has no id and queueKey")
    # BullMQ's scripts search for the colon in quadratic time: a long string without a colon would block Redis.
    if b":" not in raw.get(b"parentKey", b":"):
        raise DecodeError(f"field parentKey of job {job_id} is not a job's key: {raw[b'parentKey'][:40]!r}")


def read_int(raw: Mapping[bytes, bytes], name: bytes, job_id: str, read: Callable[[bytes], int] = field_number) -> int:
    """Return a numeric field; 0 if the field is missing.

    Raises:
        DecodeError: It is not a number.
    """
    value = raw.get(name)
    if value is None:
        return 0
    if len(value) == 1 and value.isdigit():  # almost every number, except times
        return int(value)
    try:
        return read(value)
    except ValueError as exc:
        raise DecodeError(f"field {name.decode()} of job {job_id} is not a number: {value[:40]!r}") from exc
