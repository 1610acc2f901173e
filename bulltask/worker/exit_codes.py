"""Exit codes of the worker and its children; docs/reference/signals.md lists them."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["ExitCode"]


class ExitCode(IntEnum):
    """Why a process exited."""

    OK = 0
    FAILED = 1
    USAGE = 2  # click's exit code for invalid options
    BOOT_FAILED = 3  # a child could not start; after several in a row, the worker exits with this code too
    # Wrong password, commands forbidden by the ACL, a redis:// URL that points to a cluster node or a Sentinel, or a
    # database that does not exist.
    BROKER_UNUSABLE = 4
    BROKER_UNREACHABLE = 5  # Redis was unavailable for more than broker_connection_max_retries attempts
