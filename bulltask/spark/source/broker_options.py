"""Where Redis is: looked up in this process, and passed to Spark as options.

Spark plans in other processes, whose environment is that of the moment when the JVM was started. They would not see a
``BULLTASK_BROKER_URL`` that a program sets later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypedDict

from bulltask import embedded
from bulltask.config.config import ENV_PREFIX, Conf, Config
from bulltask.config.urls import SecretUrl
from bulltask.errors import ConfigError

__all__ = ["BrokerOptions", "broker_options", "option_error", "resolve_config"]


class BrokerOptions(TypedDict, total=False):
    """Where Redis is, and how its queues are named; bulltask's settings if omitted.

    Attributes:
        url: Of Redis; reads are best sent to a replica.
        prefix: The first part of every BullMQ key.
        queue_hash_tag: Whether queue ``emails`` is BullMQ's ``{emails}``.
    """

    url: str | SecretUrl | None
    prefix: str | None
    queue_hash_tag: bool | None


def broker_options(where: Mapping[str, Any]) -> dict[str, str]:
    """Return the options ``url``, ``prefix`` and ``queueHashTag`` of ``format("bulltask")``.

    Args:
        where: The arguments of a function, including those of `BrokerOptions`; bulltask's settings supply what is
            missing.

    Raises:
        ConfigError: One of them is invalid.
    """
    given = {
        "broker_url": where.get("url"),
        "prefix": where.get("prefix"),
        "queue_hash_tag": where.get("queue_hash_tag"),
    }
    config = resolve_config(given)
    return {
        "url": embedded.resolve_url(config.broker_url).get_secret_value(),
        "prefix": config.prefix,
        "queueHashTag": str(config.queue_hash_tag).lower(),
    }


def resolve_config(given: Mapping[str, object], environ: Mapping[str, str] | None = None) -> Config:
    """Return bulltask's settings; values in ``given`` that are not ``None`` override the environment.

    Raises:
        ConfigError: One is invalid.
    """
    set_here = {name: value for name, value in given.items() if value is not None}
    beaten = {ENV_PREFIX + name.upper() for name in set_here}
    around = os.environ if environ is None else environ
    try:
        return Conf(set_here, {name: text for name, text in around.items() if name not in beaten}).freeze()
    except ConfigError as exc:
        raise option_error("INVALID", str(exc)) from None


def option_error(code: str, text: str) -> ConfigError:
    """Return the error for an invalid option; its message begins with a code."""
    return ConfigError(f"[BULLTASK_OPTION_{code}] {text}")
