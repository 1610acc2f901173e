"""The location of Redis: resolved in this process, and passed to Spark as options.

Spark plans reads in other processes, which have the environment that the JVM was started with. They would not see a
``BULLTASK_BROKER_URL`` that a program sets later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypedDict

from bulltask import embedded
from bulltask.config.config import Config
from bulltask.config.settings import ENV_PREFIX, Settings
from bulltask.config.urls import SecretUrl
from bulltask.jobs.errors import ConfigError

__all__ = ["BrokerOptions", "broker_options", "option_error", "resolve_config"]


class BrokerOptions(TypedDict, total=False):
    """The location of Redis, and how queues are named; default: bulltask's settings.

    Attributes:
        url: The URL of Redis, preferably of a replica.
        prefix: The first part of every BullMQ key.
        queue_hash_tag: Whether BullMQ's name for queue ``emails`` is ``{emails}``.
    """

    url: str | SecretUrl | None
    prefix: str | None
    queue_hash_tag: bool | None


def broker_options(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the options ``url``, ``prefix`` and ``queueHashTag`` of ``format("bulltask")``.

    Args:
        arguments: The arguments of a function, including `BrokerOptions`; other values come from bulltask's settings.

    Raises:
        ConfigError: An option is invalid.
    """
    settings = {
        "broker_url": arguments.get("url"),
        "prefix": arguments.get("prefix"),
        "queue_hash_tag": arguments.get("queue_hash_tag"),
    }
    config = resolve_config(settings)
    return {
        "url": embedded.resolve_url(config.broker_url).get_secret_value(),
        "prefix": config.prefix,
        "queueHashTag": str(config.queue_hash_tag).lower(),
    }


def resolve_config(overrides: Mapping[str, object], environ: Mapping[str, str] | None = None) -> Config:
    """Return bulltask's settings; values in ``overrides`` that are not ``None`` override the environment.

    Raises:
        ConfigError: A setting is invalid.
    """
    explicit = {name: value for name, value in overrides.items() if value is not None}
    overridden = {ENV_PREFIX + name.upper() for name in explicit}
    environment = os.environ if environ is None else environ
    try:
        return Settings(explicit, {name: text for name, text in environment.items() if name not in overridden}).freeze()
    except ConfigError as exc:
        raise option_error("INVALID", str(exc)) from None


def option_error(code: str, text: str) -> ConfigError:
    """Return the error for an invalid option; its message begins with a code."""
    return ConfigError(f"[BULLTASK_OPTION_{code}] {text}")
