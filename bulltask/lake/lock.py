"""One writer of a lake's stream at a time: a lock that ends with the process that has it."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from typing import Final, Self

from bulltask.errors import LakeInUse
from bulltask.lake.layout import Layout

__all__ = ["RunLock"]

_NAME: Final = "lock"


class RunLock:
    """Responsible for a lake being fed by one stream only. Taken when made; ``kill -9`` gives it back, too.

    Args:
        layout: of the lake; its directories are made.

    Raises:
        LakeInUse: another stream feeds it.
    """

    def __init__(self, layout: Layout) -> None:
        path = layout.own(_NAME)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            other = os.read(self._file, 20).decode("ascii", "replace").strip()
            os.close(self._file)
            raise LakeInUse(
                f"the lake {layout.root} is fed by process {other} already; stop that one, or give this one a root of "
                "its own"
            ) from exc
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let others feed the lake; again does nothing."""
        file, self._file = self._file, -1
        if file >= 0:
            with suppress(OSError):
                os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
