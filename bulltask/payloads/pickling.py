"""cloudpickle, for values that JSON cannot represent. This is the only module that loads pickles.

A pickle can run any code when it is loaded. Therefore, :func:`load` is called only with bytes whose signature has been
verified with a key of the app (:mod:`bulltask.payloads.payload_codec`).
"""

from __future__ import annotations

from typing import Any

from bulltask.errors import DecodeError, EncodeError, incompatible

__all__ = ["dump", "load"]


def dump(value: object, what: str) -> bytes:
    """Return the value as a pickle.

    Raises:
        EncodeError: It cannot be pickled.
    """
    import cloudpickle  # type: ignore[import-untyped]  # noqa: PLC0415 - most apps never need it

    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as exc:
        raise EncodeError(f"{what} cannot be pickled: {type(exc).__name__}: {exc}") from exc
    return data


def load(data: bytes, what: str) -> Any:
    """Return the value of a pickle whose signature has been verified.

    Raises:
        DecodeError: It cannot be loaded, for example because a module does not exist in this process.
    """
    import cloudpickle  # noqa: PLC0415 - see dump()

    try:
        return cloudpickle.loads(data)
    except (Exception, SystemExit) as exc:
        error = DecodeError(f"{what} cannot be unpickled: {type(exc).__name__}: {exc}")
        # A module or class does not exist in this version of the app.
        raise incompatible(error) if isinstance(exc, ImportError | AttributeError) else error from exc
