"""Where a server keeps its files, and the small file by which others find it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from bulltask.embedded.binary import ServerBinary
from bulltask.embedded.probe import HOST, ask, server_info
from bulltask.errors import ConfigError

__all__ = ["DataDirectory", "ServerRecord"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class DataDirectory:
    """The directories of one set of data, one for each line of servers: ``ROOT/valkey-9/NAME``.

    A line is a flavour and a major version. Each has its own directory, because Redis refuses the files of Valkey.

    Attributes:
        root: absolute path.
        name: last part of the path; may be empty.
    """

    root: Path
    name: str = ""

    @classmethod
    def named(cls, name: str = "") -> Self:
        """The user's own data of that name, ``"default"`` when empty, in ``$XDG_DATA_HOME/bulltask``.

        Raises:
            ConfigError: the name has other characters than letters, digits, ``_``, ``.`` and ``-``.
        """
        if name and not _NAME.fullmatch(name):
            raise ConfigError(
                f"an embedded server's name has 1 to 64 letters, digits, '_', '.' or '-', and does not begin with "
                f"'.' or '-': {name!r} is none"
            )
        stated = os.environ.get("XDG_DATA_HOME", "")
        base = Path(stated) if Path(stated).is_absolute() else Path.home() / ".local" / "share"
        return cls(base / "bulltask", name or "default")

    @classmethod
    def at(cls, directory: Path | str) -> Self:
        """The data in a directory of the user's choice; a relative path means the current directory's."""
        return cls(Path(directory).expanduser().absolute())

    def directory(self, binary: ServerBinary) -> Path:
        """The directory for the files of this program."""
        return self.root / binary.line / self.name

    @property
    def turn_file(self) -> Path:
        """The lock that one has to hold who decides whether a server must be started here, of whatever line."""
        return self.root / f"{self.name or 'this'}.start.lock"

    def running(self) -> tuple[Path, ServerRecord] | None:
        """The directory and the facts of the server that runs here, of whatever line; ``None`` when none does."""
        for directory in self._directories():
            known = ServerRecord.read(directory)
            if known is not None and known.still_runs():
                return directory, known
        return None

    def left_behind(self, binary: ServerBinary) -> list[Path]:
        """Directories of other lines with data that was used later than this program's own: after an upgrade, say."""
        own = self.directory(binary)
        return [other for other in self._directories() if other != own and _last_use(other) > _last_use(own)]

    def _directories(self) -> list[Path]:
        return [line / self.name for line in sorted(self.root.glob("*-*")) if (line / self.name).is_dir()]


@dataclass(frozen=True)
class ServerRecord:
    """What ``server.json`` says of a server: trusted only when the server itself says the same.

    Attributes:
        pid: process id.
        port: TCP port on 127.0.0.1.
        run_id: the 40 hexadecimal digits that a server draws at its start; no other server has them.
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
        """Read what was written last; ``None`` when there is nothing, or nothing that makes sense."""
        try:
            said = json.loads((directory / "server.json").read_bytes())
            known = cls(int(said["pid"]), int(said["port"]), str(said["run_id"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return known if 0 < known.port < 65536 else None

    def write(self, directory: Path) -> None:
        """Write it for others; a reader sees the old text or the new one, never a part."""
        draft = directory / f"server.json.{os.getpid()}"
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(directory / "server.json")

    def still_runs(self) -> bool:
        """Ask the server on the port who it is: a restarted one, or a stranger's, has another run id."""
        try:
            if ask(self.port, "PING", timeout=5.0) != "+PONG":  # nobody there is said at once; 5 s are for a busy one
                return False
            return server_info(self.port, timeout=5.0).get("run_id") == self.run_id
        except OSError:
            return False


def _last_use(directory: Path) -> float:
    """When a server was last started on the data there; 0 when there are none."""
    files = [directory / "appendonlydir", directory / "appendonly.aof"]  # the latter: Redis 6.2
    if not any(file.exists() for file in files):
        return 0.0
    try:
        return (directory / "server.json").stat().st_mtime
    except OSError:
        return 1.0
