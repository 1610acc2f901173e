"""Keys and payloads of the tests for serializers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

__all__ = ["ENCRYPTION_KEY", "FIRST_KEY", "OTHER_ENCRYPTION_KEY", "PICKLES", "SECOND_KEY", "Refused", "WritesFile"]

FIRST_KEY: Final = "k1:" + "a1-_" * 10 + "a1o"
SECOND_KEY: Final = "k2:" + "b2-_" * 10 + "b2s"

ENCRYPTION_KEY: Final = "e1:" + "c3-_" * 10 + "c3w"
OTHER_ENCRYPTION_KEY: Final = "e2:" + "d4-_" * 10 + "d40"

PICKLES: Final[dict[str, Any]] = {"accept_content": ["json", "cloudpickle"], "payload_signing_keys": FIRST_KEY}
"""Settings that allow cloudpickle."""


class Refused(Exception):
    """An exception whose attributes the message does not contain, and whose constructor takes two arguments."""

    def __init__(self, code: int, details: dict[str, Any]) -> None:
        super().__init__(code, details)
        self.code, self.details = code, details


class WritesFile:
    """An object whose pickle writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return _write, (str(self.path),)


def _write(path: str) -> None:
    Path(path).write_text("loaded")
