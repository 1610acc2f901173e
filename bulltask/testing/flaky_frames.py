"""Splits a byte stream into Redis values."""

from __future__ import annotations

__all__ = ["Frames"]

STRINGS = frozenset(b"$=!")  # length, then that many bytes
PARTS = {ord("*"): 1, ord("~"): 1, ord(">"): 1, ord("%"): 2, ord("|"): 2}  # values per counted element
KINDS = frozenset(b"+-:_#,(") | STRINGS | PARTS.keys()
ATTRIBUTE = ord("|")


class Frames:
    """Splits a byte stream into whole RESP2 and RESP3 values; any other stream into the chunks in which it arrives.

    Attributes:
        opaque: True once the stream is known not to be RESP (TLS, inline commands).
    """

    def __init__(self) -> None:
        self.opaque = False
        self._buffer = bytearray()
        self._at = 0
        self._missing = 1  # how far the first value was read, and how many of its parts are missing

    def feed(self, data: bytes) -> list[bytes]:
        """Return the values that ``data`` completes."""
        self._buffer += data
        values = []
        try:
            while not self.opaque and self._read_value():
                values.append(self._take(self._at))
        except ValueError:
            self.opaque = True
        return values + ([self.rest()] if self.opaque and self._buffer else [])

    @property
    def partial(self) -> bool:
        """True if a part of a value has arrived."""
        return bool(self._buffer)

    def rest(self) -> bytes:
        """Return the bytes of a value that will never be complete."""
        return self._take(len(self._buffer))

    def _take(self, size: int) -> bytes:
        value = bytes(self._buffer[:size])
        del self._buffer[:size]
        self._at = 0
        self._missing = 1
        return value

    def _read_value(self) -> bool:
        while self._missing and self._read_part():
            pass
        return not self._missing

    def _read_part(self) -> bool:
        """Skip one header and its text; False if it has not arrived completely.

        Raises:
            ValueError: This is not RESP.
        """
        if self._at == len(self._buffer):
            return False
        kind = self._buffer[self._at]
        if kind not in KINDS:
            raise ValueError("not RESP")
        line_end = self._buffer.find(b"\r\n", self._at)
        if line_end < 0:
            return False
        counted = kind in STRINGS or kind in PARTS
        size = int(self._buffer[self._at + 1 : line_end]) if counted else 0
        end = line_end + 2 + (size + 2 if kind in STRINGS and size >= 0 else 0)
        if end > len(self._buffer):
            return False
        # An attribute precedes the value that it describes and does not count as that value.
        self._missing += PARTS.get(kind, 0) * max(size, 0) - (kind != ATTRIBUTE)
        self._at = end
        return True
