"""Serve the history as JSON over HTTP, for programs on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from bulltask.jobs.errors import BulltaskError, ConfigError
from bulltask.lake.history import History
from bulltask.lake.records import to_json
from bulltask.observe.http_requests import LOCAL_HOSTS, RequestDeadline, host_of

HOST: Final = "127.0.0.1"

Parameters = Mapping[str, str]

_PATHS: Final = ("/search", "/job", "/job-counts", "/attempt-counts", "/latency")


class HistoryServer(ThreadingHTTPServer):
    """An HTTP server for a lake's history, on 127.0.0.1 only; it answers one request at a time.

    ``GET /search``, ``/job``, ``/job-counts``, ``/attempt-counts`` and ``/latency`` call the methods of
    :class:`bulltask.lake.history.History`; their arguments are query parameters, with times in ISO 8601. The status is
    400 for invalid parameters, 404 for an unknown job, 503 for a lake that cannot be read; the body of an error is
    ``{"error": "…"}``. Port 0 is any free port.
    """

    daemon_threads = True

    def __init__(self, history: History, port: int) -> None:
        self._history = history
        self._lock = threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as exc:
            raise ConfigError(f"port {port} on {HOST} is not available: {exc.strerror}; choose another one") from exc

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"http://{HOST}:{self.server_port}/"

    def respond(self, path: str, parameters: Parameters) -> Any:
        """Return the response as JSON values; ``None`` for an unknown job or path.

        Invalid parameters raise ``ConfigError`` or ``TypeError``.
        """
        if path not in _PATHS:
            return None
        with self._lock:
            arguments: dict[str, Any] = {name: _PARSERS.get(name, str)(value) for name, value in parameters.items()}
            if path == "/job":
                if "id" not in arguments:
                    raise ConfigError("the parameter id is missing: /job?id=…")
                arguments["job_id"] = arguments.pop("id")
            return to_json(getattr(self._history, path[1:].replace("-", "_"))(**arguments))


class _Handler(RequestDeadline):
    """The handler of one request."""

    server: HistoryServer

    def do_GET(self) -> None:
        """Respond to a request."""
        status, body = self._respond()
        data = json.dumps(body, ensure_ascii=False).encode(errors="backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(data)

    def _respond(self) -> tuple[HTTPStatus, Any]:
        if host_of(self.headers.get("Host", "")).lower() not in LOCAL_HOSTS:
            return HTTPStatus.FORBIDDEN, {"error": f"only requests to {HOST} are allowed"}
        try:
            url = urlsplit(self.path)
            parameters = dict(parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query)))
            response = self.server.respond(url.path, parameters)
        except (ValueError, TypeError, OverflowError, RecursionError) as exc:  # ConfigError is a ValueError
            return HTTPStatus.BAD_REQUEST, {"error": str(exc)}
        except BulltaskError as exc:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(exc)}
        if response is None:
            return HTTPStatus.NOT_FOUND, {"error": "there is no such job or path"}
        return HTTPStatus.OK, response

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"invalid time {text!r}: write it like 2026-11-22T14:00:00Z") from None


_PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "since": _time,
    "until": _time,
    "percentiles": lambda text: tuple(float(part) for part in text.split(",")),
    "every": lambda text: text or None,
}
"""Parsers of parameters that are not text; an empty ``every`` requests one point for the whole period."""
