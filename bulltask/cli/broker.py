"""``-b``: where Redis is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bulltask.config.urls import SecretUrl

__all__ = ["broker_option"]

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType


class _Url(_ParamType):
    """A URL as click keeps it: a crash report that shows click's context shows no password."""

    name = "URL"

    def convert(self, value: str | SecretUrl, _param: click.Parameter | None, _ctx: click.Context | None) -> SecretUrl:
        return SecretUrl(value)


def broker_option(function: F) -> F:
    """Give a command ``-b``."""
    return click.option(
        "-b",
        "--broker",
        type=_Url(),
        help="Redis URL; wins over the app's own. Command lines are visible to all users of this machine (ps): put one "
        "with a password into BULLTASK_BROKER_URL, or into a file named by BULLTASK_BROKER_URL_FILE.",
    )(function)
