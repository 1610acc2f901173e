"""Exit codes of the worker and its children; docs/reference/signals.md lists them."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["ExitCode"]


class ExitCode(IntEnum):
    """Why a process ended."""

    OK = 0
    FAILED = 1
    USAGE = 2  # click's own
    BOOT_FAILED = 3  # a child could not start; the worker stops when it keeps happening
    BROKER_UNUSABLE = 4  # wrong password, commands forbidden by the ACL, a server or database that cannot be used
    BROKER_UNREACHABLE = 5  # Redis was unavailable for more attempts than broker_connection_max_retries
