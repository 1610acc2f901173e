"""The Flask application; ``create_app`` is its factory."""

from __future__ import annotations

from typing import Any

from flask import Flask

from bulltask import App
from shop.context import AppContextMiddleware
from shop.reports import reports


def create_app(**config: Any) -> Flask:
    """Create the Flask application, and bulltask's app with it."""
    flask_app = Flask(__name__)
    flask_app.config.from_mapping(BULLTASK={"broker_url": "embedded://flask-shop"}, CURRENCY="EUR")
    flask_app.config.from_mapping(config)
    flask_app.extensions["bulltask"] = create_bulltask(flask_app)
    flask_app.register_blueprint(reports)
    return flask_app


def create_bulltask(flask_app: Flask) -> App:
    app = App(flask_app.name, **flask_app.config["BULLTASK"])
    app.add_middleware(AppContextMiddleware(flask_app))
    return app
