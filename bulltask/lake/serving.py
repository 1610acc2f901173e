"""The history as JSON over HTTP, for programs on this machine that are not written in Python."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from bulltask.errors import BulltaskError, ConfigError
from bulltask.lake.history import History
from bulltask.lake.records import to_json

__all__ = ["HOST", "HistoryServer"]

HOST: Final = "127.0.0.1"

_TIMEOUT_S: Final = 10
"""A client that says nothing for so long is left."""

Asked = Mapping[str, str]


class HistoryServer(ThreadingHTTPServer):
    """Responsible for answering questions about a lake, one at a time, on 127.0.0.1 alone.

    ``GET /search``, ``/job``, ``/counts``, ``/rate`` and ``/latency`` are the methods of
    :class:`bulltask.lake.history.History`; their arguments are query parameters, times in ISO 8601. What makes no sense
    is answered with 400, an unknown job with 404, a lake that cannot be read with 503; each is ``{"error": "…"}``.

    Args:
        history: what is asked.
        port: where it listens; 0 for any free one.

    Raises:
        ConfigError: the port cannot be had.
    """

    daemon_threads = True

    def __init__(self, history: History, port: int) -> None:
        self._history, self._one_at_a_time = history, threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as exc:
            raise ConfigError(f"port {port} of {HOST} cannot be had: {exc.strerror}; choose another one") from exc

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.server_port}/"

    def answer(self, path: str, asked: Asked) -> Any:
        """Return what a question is answered with, as values of JSON; ``None`` when there is no such thing.

        Args:
            path: of the URL.
            asked: its parameters.

        Raises:
            ConfigError, TypeError: it makes no sense.
            LakeError: the lake cannot be read.
        """
        questions: Mapping[str, Callable[[dict[str, Any]], Any]] = {
            "/search": lambda given: self._history.search(**given),
            "/job": lambda given: self._history.job(given["id"], given.get("queue")),
            "/counts": lambda given: self._history.counts(**given),
            "/rate": lambda given: self._history.rate(**given),
            "/latency": lambda given: self._history.latency(**given),
        }
        if path not in questions:
            return None
        with self._one_at_a_time:
            given: dict[str, Any] = {name: _READ.get(name, str)(value) for name, value in asked.items()}
            if path == "/job" and "id" not in given:
                raise ConfigError("which job? Say ?id=…")
            return to_json(questions[path](given))


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: HistoryServer
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        """Answer."""
        # A page of somebody else, open in a browser here, could have its name lead to 127.0.0.1.
        if self.headers.get("Host", "").partition(":")[0] not in {HOST, "localhost"}:
            self._send(HTTPStatus.FORBIDDEN, {"error": f"this answers to {HOST} alone"})
            return
        said = urlsplit(self.path)
        try:
            found = self.server.answer(said.path, _parameters(said.query))
        except (ValueError, TypeError) as exc:  # ConfigError is one
            self._send(HTTPStatus.BAD_REQUEST, {"error": str(exc)})
        except BulltaskError as exc:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(exc)})
        else:
            missing = {"error": "there is no such job or question"}
            self._send(HTTPStatus.NOT_FOUND if found is None else HTTPStatus.OK, missing if found is None else found)

    def log_message(self, *_: Any) -> None:
        """Write no line for each request."""

    def _send(self, status: HTTPStatus, body: Any) -> None:
        data = json.dumps(body, ensure_ascii=False).encode(errors="backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(data)


def _parameters(query: str) -> dict[str, str]:
    return dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no time; one looks like 2026-11-22T14:00:00Z") from None


def _percentiles(text: str) -> tuple[float, ...]:
    return tuple(float(one) for one in text.split(","))


_READ: Final[Mapping[str, Callable[[str], Any]]] = {
    "since": _time,
    "until": _time,
    "limit": int,
    "percentiles": _percentiles,
    "every": lambda text: text or None,
}
"""How parameters are read that are no texts; an empty ``every`` asks for one point of the whole time."""
