"""A lock that lets one pipeline at a time write to a lake. It is released when the process that holds it ends."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import Final, Self

from bulltask.jobs.errors import ConfigError, LakeInUseError
from bulltask.lake.layout import Layout

if sys.platform != "win32":
    import fcntl

__all__ = ["RunLock", "check_platform", "writer_pid"]

_NAME: Final = "lock"


def check_platform() -> None:
    """Check that this system has the locks with which a process writes to a lake.

    Raises:
        ConfigError: It has not.
    """
    if sys.platform == "win32":
        raise ConfigError("on Windows, bulltask cannot write to a lake: run this command in WSL 2 or a Linux container")


class RunLock:
    """The lock of the pipeline that is writing to a lake, acquired by the constructor. A ``kill -9`` releases it, too.

    Args:
        layout: The lake. Its directories are created.

    Raises:
        LakeInUseError: Another pipeline is already writing to the lake.
        ConfigError: This is Windows.
    """

    def __init__(self, layout: Layout) -> None:
        check_platform()
        path = layout.internal(_NAME)
        self._releasing = threading.RLock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            pid = os.read(self._file, 20).decode("ascii", "replace").strip()
            os.close(self._file)
            raise LakeInUseError(
                f"process {pid} is already writing to the lake {layout.root}: stop it, or choose another directory"
            ) from exc
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock; further calls only wait until it is released."""
        with self._releasing:
            file = self._file
            self._file = -1
            if file >= 0:
                with suppress(OSError):
                    # Closing is not enough: a process forked in the meantime would keep the lock until it exits.
                    fcntl.flock(file, fcntl.LOCK_UN)
                    os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def writer_pid(layout: Layout) -> int | None:
    """Return the id of the process on this machine whose pipeline is writing to a lake; ``None`` if there is none."""
    if sys.platform == "win32":
        return None
    try:
        file = os.open(layout.internal(_NAME), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(file, 20).decode("ascii", "replace").strip()
        return int(text) if text.isdecimal() else None
    else:
        return None
    finally:
        os.close(file)
