"""Drive bull-board from Python through its HTTP API (node/board.js)."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self, cast
from urllib.parse import quote

import httpx

from tests.interop.node_bridge import connection_of

__all__ = ["Board", "BoardError"]

SCRIPT = Path(__file__).parent / "node" / "board.js"
END_S = 5.0  # node/board.js takes 2 s at most


class BoardError(Exception):
    """The board rejected a request.

    Args:
        status: The HTTP status.
        body: The body of the response; the board translates its ``error.key`` for the user.
    """

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        self.status, self.key = status, body.get("error", {}).get("key")
        super().__init__(f"{status} {body}")


class Board:
    """A running bull-board.

    ::

        with Board("redis://127.0.0.1:6379/0", [{"name": "{mail}"}]) as board:
            print(board.queue("{mail}", "failed")["jobs"])
            board.put("{mail}", "retry", "failed")

    Args:
        url: The Redis server.
        queues: The queues to show: ``name`` in BullMQ, and options of the board's adapter.
        history: The URL of ``bulltask history serve``, for the board's charts over months.
    """

    def __init__(self, url: str, queues: Sequence[Mapping[str, Any]], history: str | None = None) -> None:
        config = {"connection": connection_of(url), "prefix": "bull", "queues": list(queues), "history": history}
        # Not a pipe: it is not read, and Node would block when it is full.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        self._process = subprocess.Popen(
            ["node", str(SCRIPT), json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        line = cast("IO[bytes]", self._process.stdout).readline()
        if not line:
            self.close()
            raise RuntimeError(f"node/board.js exited before it listened: {self.stderr}")
        self.url = f"http://127.0.0.1:{json.loads(line)['port']}"
        self._http = httpx.Client(base_url=self.url, timeout=30)

    @property
    def pid(self) -> int:
        """Process id of Node."""
        return self._process.pid

    def read(self, path: str, **params: object) -> Any:
        """``GET /api/PATH``."""
        return self._request("GET", f"/api/{path}", params={name: str(value) for name, value in params.items()})

    def get(self, *parts: str, **params: object) -> Any:
        """``GET /api/queues/PARTS``; the parts may have any characters."""
        return self._request("GET", _path(parts), params={name: str(value) for name, value in params.items()})

    def put(self, *parts: str, **body: object) -> Any:
        """``PUT /api/queues/PARTS`` with a JSON body."""
        return self._request("PUT", _path(parts), json=body)

    def patch(self, *parts: str, **body: object) -> Any:
        """``PATCH /api/queues/PARTS`` with a JSON body."""
        return self._request("PATCH", _path(parts), json=body)

    def post(self, *parts: str, **body: object) -> Any:
        """``POST /api/queues/PARTS`` with a JSON body."""
        return self._request("POST", _path(parts), json=body)

    def page(self, path: str) -> str:
        """Return the HTML of a page."""
        return self._http.get(path).raise_for_status().text

    def queue(self, name: str, status: str = "latest", *, page: int = 1, per_page: int = 10) -> dict[str, Any]:
        """Return a queue as its page shows it: counts, pagination, the jobs of one state."""
        shown = self.read("queues", activeQueue=quote(name), status=status, page=page, jobsPerPage=per_page)
        match: dict[str, Any] = next(queue for queue in shown["queues"] if queue["name"] == name)
        return match

    def job(self, queue: str, job_id: str) -> dict[str, Any]:
        """Return a job as its page shows it, with its ``status``."""
        shown = self.get(queue, job_id)
        return {**shown["job"], "status": shown["status"]}

    @property
    def stderr(self) -> str:
        """Node's output to stderr."""
        if self._errors.closed:
            return ""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2_000:]

    def close(self) -> None:
        """End Node."""
        if hasattr(self, "_http"):
            self._http.close()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()  # it exits at the end of its input
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        cast("IO[bytes]", self._process.stdout).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._errors.close()

    def _request(self, method: str, path: str, **request: Any) -> Any:
        response = self._http.request(method, path, **request)
        body = response.json() if response.content else {}
        if response.is_error:
            raise BoardError(response.status_code, body)
        return body


def _path(parts: Sequence[str]) -> str:
    return "/api/queues/" + "/".join(quote(part, safe="") for part in parts)
