"""The directory with a server's files, and the file that lets other processes find the server."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from bulltask.embedded.binary import ServerBinary
from bulltask.embedded.launch import ADVICE
from bulltask.embedded.probe import HOST, send_command, server_info
from bulltask.embedded.project import find_project, server_name
from bulltask.errors import ConfigError

__all__ = ["DataDirectory", "ServerRecord"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class DataDirectory:
    """The data directories for one name, one for each release series: ``ROOT/valkey-9/NAME``.

    A release series is a flavor and a major version. Each has a separate directory: Redis cannot read Valkey's files.

    Attributes:
        root: Absolute path.
        name: Last part of the path; may be empty.
    """

    root: Path
    name: str = ""

    @classmethod
    def of_project(cls, directory: Path | None = None) -> Self:
        """Return the data directory of the project that contains a directory (default: the current directory).

        Raises:
            ConfigError: The current directory has been removed.
        """
        return cls.named(server_name(find_project(directory)))

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the user's data directory with that name, in ``$XDG_DATA_HOME/bulltask``.

        Raises:
            ConfigError: The name contains characters other than letters, digits, ``_``, ``.`` and ``-``, or the user
                has no home directory.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"Invalid embedded server name {name!r}: use 1 to 64 letters, digits, '_', '.' or '-', and do "
                f"not start with '.' or '-'"
            )
        xdg_data_home = os.environ.get("XDG_DATA_HOME", "")
        try:
            base = Path(xdg_data_home) if Path(xdg_data_home).is_absolute() else Path.home() / ".local" / "share"
        except RuntimeError as exc:
            raise ConfigError(f"embedded:// has no directory for its data, because HOME is not set: {ADVICE}") from exc
        return cls(base / "bulltask", name)

    @classmethod
    def at(cls, directory: Path | str) -> Self:
        """Return the data directory at a path; a relative path is relative to the current directory."""
        return cls(Path(directory).expanduser().absolute())

    def directory(self, binary: ServerBinary) -> Path:
        """Return the directory for this program's files."""
        return self.root / binary.release_series / self.name

    @property
    def lock_file(self) -> Path:
        """The lock to hold while deciding whether a server, of any release series, must be started on this data."""
        return self.root / f"{self.name or 'this'}.start.lock"

    def running(self) -> tuple[Path, ServerRecord] | None:
        """Return the directory and record of the server, of any series, that is running on this data, or ``None``."""
        for directory in self._directories():
            record = ServerRecord.read(directory)
            if record is not None and record.is_running():
                return directory, record
        return None

    def newer_directories(self, binary: ServerBinary) -> list[Path]:
        """Return directories of other release series with newer data than this program's, such as after an upgrade."""
        current = self.directory(binary)
        return [other for other in self._directories() if other != current and _last_use(other) > _last_use(current)]

    def _directories(self) -> list[Path]:
        return [series / self.name for series in sorted(self.root.glob("*-*")) if (series / self.name).is_dir()]


@dataclass(frozen=True)
class ServerRecord:
    """Content of ``server.json``; trusted only if the server itself reports the same.

    Attributes:
        pid: Process id.
        port: TCP port on 127.0.0.1.
        run_id: 40 random hexadecimal digits, which identify one run of a server.
    """

    pid: int
    port: int
    run_id: str

    @property
    def url(self) -> str:
        """The URL for clients."""
        return f"redis://{HOST}:{self.port}/0"

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Read the last record; ``None`` if it is missing or invalid."""
        try:
            stored = json.loads((directory / "server.json").read_bytes())
            record = cls(int(stored["pid"]), int(stored["port"]), str(stored["run_id"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return record if 0 < record.port < 65536 else None

    def write(self, directory: Path) -> None:
        """Write the record atomically, so that a reader never sees a partial record."""
        draft = directory / f"server.json.{os.getpid()}"
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(directory / "server.json")

    def is_running(self) -> bool:
        """Check the run id of the server on that port: another server, or a restarted server, has a different id."""
        try:
            # The timeout is for a busy server; a closed port fails immediately.
            if send_command(self.port, "PING", timeout=5.0) != "+PONG":
                return False
            return server_info(self.port, timeout=5.0).get("run_id") == self.run_id
        except OSError:
            return False


def _last_use(directory: Path) -> float:
    """Return when a server was last started in a directory; 0 if the directory has no data."""
    files = [directory / "appendonlydir", directory / "appendonly.aof"]  # the latter is Redis 6.2's
    if not any(file.exists() for file in files):
        return 0.0
    try:
        return (directory / "server.json").stat().st_mtime
    except OSError:
        return 1.0
