"""A PostgreSQL server for tests: Debian's programs, a temporary directory, a Unix socket, no fsync."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path

import psycopg

from bulltask.testing.worker import wait_until
from tests.support.processes import SESSION_VARIABLE

__all__ = ["PostgresServer", "postgres_programs"]

_FAST = ("fsync=off", "full_page_writes=off", "synchronous_commit=off", "max_connections=50", "shared_buffers=16MB")


def postgres_programs() -> Path | None:
    """The directory of ``initdb`` and ``postgres``, ``None`` if PostgreSQL is not installed."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).parent
    return next((path.parent for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None)


class PostgresServer:
    """A running server.

    Args:
        programs: The directory of its programs.
        directory: A short path, because that of a Unix socket may have only 107 characters.
    """

    def __init__(self, programs: Path, directory: Path) -> None:
        self.directory, self._databases = directory, 0
        self._as_user: list[str] = []
        if os.getuid() == 0:  # PostgreSQL refuses to run as root
            user = pwd.getpwnam("nobody")
            os.chown(directory, user.pw_uid, user.pw_gid)
            directory.chmod(0o755)
            self._as_user = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        data = str(directory / "data")
        init = [
            str(programs / "initdb"),
            "-D",
            data,
            "-U",
            "test",
            "-A",
            "trust",
            "--no-sync",
            "-E",
            "UTF8",
            "--locale=C",
        ]
        subprocess.run([*self._as_user, *init], check=True, stdout=subprocess.DEVNULL, cwd=directory)
        options = [word for option in _FAST for word in ("-c", option)]
        run = [str(programs / "postgres"), "-D", data, "-k", str(directory), "-c", "listen_addresses=", *options]
        with (directory / "log").open("wb") as log:
            # Without the variable by which the tests find processes that a test has left running.
            environ = {name: value for name, value in os.environ.items() if name != SESSION_VARIABLE}
            self._process = subprocess.Popen([*self._as_user, *run], stdout=log, stderr=log, cwd=directory, env=environ)
        wait_until(self._answers, 30, "PostgreSQL")

    @property
    def pid(self) -> int:
        return self._process.pid

    def create_database(self) -> str:
        """Create an empty database; return its name."""
        self._databases += 1
        name = f"test_{self._databases}"
        with psycopg.connect(self.conninfo("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return name

    def conninfo(self, database: str) -> str:
        return f"host={self.directory} user=test dbname={database}"

    def url(self, database: str) -> str:
        """The URL for SQLAlchemy."""
        return f"postgresql+psycopg://test@/{database}?host={self.directory}"

    def stop(self) -> None:
        self._process.terminate()  # waits for sessions to end
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.send_signal(2)  # fast shutdown
            self._process.wait(10)

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self.directory / "log").read_text()
        try:
            psycopg.connect(self.conninfo("postgres")).close()
        except psycopg.OperationalError:
            return False
        return True
