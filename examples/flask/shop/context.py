"""Middleware that runs each task in Flask's application context."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from flask import Flask
from flask.ctx import AppContext

from bulltask import Middleware, Request


class AppContextMiddleware(Middleware):
    def __init__(self, flask_app: Flask) -> None:
        self._flask_app, self._context = flask_app, ContextVar[AppContext]("context")

    def before_run(self, request: Request) -> None:
        context = self._flask_app.app_context()
        context.push()
        self._context.set(context)

    def after_run(self, request: Request, result: Any, exception: BaseException | None) -> None:
        self._context.get().pop(exception)
