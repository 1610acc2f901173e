"""A temporary Redis or Valkey server for tests, which starts in about 50 ms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from bulltask.embedded import EmbeddedServer, find_binary
from bulltask.embedded.binary import Flavor

__all__ = ["RedisServer"]


class RedisServer:
    """A server on a separate port, with its files in the test's directory; created by `RedisServer.start`.

    It ends with the test process, even if that process is killed. Example::

        def test_an_email_survives_a_crash_of_redis(tmp_path):
            with RedisServer.start(tmp_path, appendonly=True) as server:
                app = App("shop", broker_url=server.url)
                ...
                server.kill()
                server.restart()
    """

    def __init__(self, process: EmbeddedServer) -> None:
        self._process = process

    @classmethod
    def start(
        cls,
        directory: Path | str,
        *,
        flavor: Flavor = "valkey",
        appendonly: bool = False,
        extra: Sequence[str] = (),
        port: int | None = None,
        password: str | None = None,
    ) -> Self:
        """Start a server and wait until it is ready.

        Args:
            directory: Directory for its files; each server needs a separate directory.
            flavor: ``"valkey"`` (the wheel of ``bulltask[embedded]``, else ``PATH``) or ``"redis"`` (``PATH``).
            appendonly: Write every change to a file before the reply (``appendfsync always``), so that the data
                survives `kill`.
            extra: Further arguments, such as ``["--maxmemory", "50mb"]``.
            port: TCP port on 127.0.0.1; ``None`` chooses a free port.
            password: Required from clients (``requirepass``).

        Returns:
            The running server; also a context manager that stops it.

        Raises:
            BrokerUnavailableError: The program was not found, or did not start; the message gives the reason.
        """
        if appendonly:
            # With everysec, a server whose disk is busy replies up to two seconds before it writes to the file.
            extra = ["--appendfsync", "always", *extra]
        process = EmbeddedServer(
            directory,
            port=port,
            binary=find_binary(flavor),
            appendonly=appendonly,
            password=password,
            restricted=False,  # tests change its configuration
            extra=extra,
        )
        process.start()
        return cls(process)

    @property
    def url(self) -> str:
        """``redis://127.0.0.1:PORT/0``, with the password if there is one."""
        return self._process.url

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1; `restart` keeps it."""
        return self._process.port

    @property
    def pid(self) -> int:
        """Process id of the server; it changes with `restart`."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """True while the server's process is running."""
        return self._process.running

    @property
    def directory(self) -> Path:
        """Absolute path of the directory with the server's files, such as ``server.log``."""
        return self._process.data_dir

    def kill(self) -> None:
        """Kill the server (``SIGKILL``), as a crash would, and wait until it is gone."""
        self._process.kill()

    def stop(self) -> None:
        """Shut the server down cleanly (``SIGTERM``) and wait until it has exited."""
        self._process.stop()

    def restart(self) -> None:
        """Stop the server if it is running, start it again on the same port and data, and wait until it is ready.

        Raises:
            BrokerUnavailableError: It did not start; the message gives the reason.
        """
        self._process.stop()
        self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
