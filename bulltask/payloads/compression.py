"""Compression of payloads, with a limit on their size after decompression."""

from __future__ import annotations

import zlib
from types import ModuleType

from bulltask.errors import DecodeError, MissingExtraError, incompatible
from bulltask.extras import check_installed
from bulltask.payloads.envelope import ZLIB, ZSTD

__all__ = ["check_compression", "compress", "decompress"]


def check_compression(name: str | None) -> None:
    """Check that a compression method is installed.

    Raises:
        MissingExtraError: It is not.
    """
    if name == ZSTD:
        check_installed("zstandard", "zstd", "zstd compression")


def compress(data: bytes, name: str) -> bytes:
    """Return the data, compressed with ``zlib`` or ``zstd``."""
    compressed: bytes = zlib.compress(data) if name == ZLIB else _zstandard().ZstdCompressor().compress(data)
    return compressed


def decompress(data: bytes, name: str, limit: int, what: str) -> bytes:
    """Return the decompressed data.

    Args:
        data: The compressed data.
        name: ``zlib`` or ``zstd``.
        limit: Maximum size of the result in bytes.
        what: Name of the data in messages.

    Raises:
        DecodeError: The data is malformed or too large, or its compression method is unknown or not installed.
    """
    if name not in {ZLIB, ZSTD}:
        raise incompatible(DecodeError(f"{what} is compressed with {name!r:.40}, which bulltask does not support"))
    try:
        found = _from_zlib(data, limit) if name == ZLIB else _from_zstd(data, limit, what)
    except MissingExtraError as exc:
        raise incompatible(DecodeError(f"{what} cannot be decompressed: {exc}")) from None
    if found is None:
        raise DecodeError(f"{what} is not valid {name} data")
    if len(found) > limit:
        raise _too_large(limit, what)
    return found


def _from_zlib(data: bytes, limit: int) -> bytes | None:
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(data, limit + 1)
    except zlib.error:
        return None
    return found if reader.eof or len(found) > limit else None


def _from_zstd(data: bytes, limit: int, what: str) -> bytes | None:
    module = _zstandard()
    try:
        if module.frame_content_size(data) > limit:
            raise _too_large(limit, what)
        # The library checks the size in the frame; max_output_size applies to frames without a size.
        found: bytes = module.ZstdDecompressor().decompress(data, max_output_size=limit)
    except module.ZstdError:
        return None
    return found


def _too_large(limit: int, what: str) -> DecodeError:
    return DecodeError(f"{what} is larger than {limit:,} bytes after decompression: raise max_decompressed to read it")


def _zstandard() -> ModuleType:
    check_compression(ZSTD)
    import zstandard  # noqa: PLC0415 - an optional dependency

    return zstandard
