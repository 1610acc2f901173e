"""Where Redis is, for what is asked of Spark: looked up in this process, handed over as options.

Spark plans in processes of its own, whose environment is that of the moment in which the JVM was started. A
``BULLTASK_BROKER_URL`` that a program sets later would not be seen there.
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
    """Which Redis, and how its queues are called: bulltask's own settings where left out.

    Attributes:
        url: of Redis; reads are best sent to a replica.
        prefix: first part of every BullMQ key.
        queue_hash_tag: whether queue ``emails`` is BullMQ's ``{emails}``.
    """

    url: str | SecretUrl | None
    prefix: str | None
    queue_hash_tag: bool | None


def broker_options(where: Mapping[str, Any]) -> dict[str, str]:
    """Return the options ``url``, ``prefix`` and ``queueHashTag`` of ``format("bulltask")``.

    Args:
        where: arguments of a function, with those of `BrokerOptions`; bulltask's settings supply what is missing.

    Raises:
        ConfigError: one of them is wrong.
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
    """Return bulltask's settings: what is given, and is not ``None``, wins over the environment.

    Raises:
        ConfigError: one is wrong.
    """
    set_here = {name: value for name, value in given.items() if value is not None}
    beaten = {ENV_PREFIX + name.upper() for name in set_here}
    around = os.environ if environ is None else environ
    try:
        return Conf(set_here, {name: text for name, text in around.items() if name not in beaten}).freeze()
    except ConfigError as exc:
        raise option_error("WRONG", str(exc)) from None


def option_error(code: str, text: str) -> ConfigError:
    """Return the error of a wrong option, with its code in front."""
    return ConfigError(f"[BULLTASK_OPTION_{code}] {text}")
