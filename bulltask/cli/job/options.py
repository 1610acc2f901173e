"""The options that the commands of ``bulltask job`` share."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import click

from bulltask.cli.pipeline.options import LakeDirectory, moment, seconds

__all__ = ["lake_option", "when"]

F = TypeVar("F", bound=Callable[..., Any])


def lake_option(*, required: bool) -> Callable[[F], F]:
    """Give a command ``--lake``."""
    return click.option(
        "--lake",
        required=required,
        envvar="BULLTASK_LAKE",
        type=LakeDirectory(file_okay=False, path_type=Path),
        help="Directory of the pipeline's tables (its --root); else BULLTASK_LAKE.",
    )


def when(text: str) -> datetime:
    """Read ``1d``, which is so long ago, or a time as :func:`bulltask.cli.pipeline.options.moment` does."""
    if text[-1:] in set("smhd") and text[:1].isdigit():
        try:
            return datetime.now(UTC) - timedelta(seconds=seconds(text))
        except OverflowError:
            raise click.BadParameter(f"{text!r} is longer ago than there are dates") from None
    try:
        return moment(text)
    except click.BadParameter:
        raise click.BadParameter(f"{text!r} is no time; one looks like 2026-11-22, 2026-11-22T14:00 or 1d") from None
