"""Checks before a worker starts: its scripts, settings, Redis, permissions, and other clients of its queues."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from bulltask.config.celery_settings import CELERY_SETTINGS
from bulltask.config.config import CONFIG_VARIABLE, ENV_PREFIX, FILE_VARIABLES, Config
from bulltask.config.settings import SETTINGS
from bulltask.errors import BrokerAuthError, BrokerConfigError, BrokerError, ScriptIntegrityError, did_you_mean
from bulltask.jobs.names import bullmq_name
from bulltask.lua import loader
from bulltask.transport.client_types import SyncClient
from bulltask.transport.grants import CLUSTER, metrics_commands, worker_commands
from bulltask.transport.inspect import ServerSettings, count_unfinished_jobs, read_queue_versions, read_server_settings
from bulltask.transport.keys import QueueKeys
from bulltask.transport.permissions import check_permissions
from bulltask.transport.produce import PROTOCOL_VERSION
from bulltask.transport.scripts.add import write_queue_meta
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.exit_codes import ExitCode

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ["Preflight"]

MIN_REDIS_VERSION: Final = (6, 2)
_BULLMQ: Final = re.compile(r"bullmq:(\d+)\.")
NON_SETTING_VARIABLES: Final = (f"{ENV_PREFIX}APP", f"{ENV_PREFIX}TEST_", CONFIG_VARIABLE, *FILE_VARIABLES.values())
"""Prefixes of environment variables that are not settings."""


class Preflight:
    """Connects to Redis and checks it before the first child starts.

    Args:
        client: The supervisor's client.
        keys: The worker's queues.
        config: The settings.
        logger: Logs warnings about settings that an operator should change.
        backoff: The delays between attempts to connect.
        connections: How many connections the worker needs at least.

    Attributes:
        max_clients: How many clients the server allows, after :meth:`run`; ``None`` if it does not say.
    """

    def __init__(
        self,
        client: SyncClient,
        keys: Sequence[QueueKeys],
        config: Config,
        logger: FilteringBoundLogger,
        backoff: ReconnectBackoff,
        connections: int = 1,
    ) -> None:
        self._client, self._keys, self._config, self._logger, self._backoff = client, keys, config, logger, backoff
        self._connections = connections
        self.max_clients: int | None = None

    def run(self, wait: Callable[[float], None], stopped: Callable[[], bool]) -> ExitCode | None:
        """Wait for Redis, check it, and store the queues' metadata; return an exit code if the worker cannot start.

        Args:
            wait: Waits for a number of milliseconds, or until a signal.
            stopped: Whether the worker was asked to stop.
        """
        if not self._check_scripts():
            return ExitCode.FAILED
        self._check_environment()
        self._check_lock_settings()
        while True:
            try:
                self._check_redis()
            except (BrokerAuthError, BrokerConfigError) as exc:
                # One line for the operator; a traceback would not help.
                rejected = isinstance(exc, BrokerAuthError)
                event = "Redis rejected this worker" if rejected else "This worker cannot use this Redis server"
                self._logger.error(event, error=str(exc))  # noqa: TRY400
                return ExitCode.BROKER_UNUSABLE
            except BrokerError as exc:
                pause_ms = self._backoff.record_failure(exc)
                if self._backoff.is_exhausted:
                    return ExitCode.BROKER_UNREACHABLE
                wait(pause_ms)
            else:
                self._backoff.reset()
                return None
            if stopped():
                return ExitCode.OK

    def _check_redis(self) -> None:
        server = read_server_settings(self._client)
        if server.version < MIN_REDIS_VERSION:
            self._logger.warning("Redis is older than 6.2; upgrade it", version=".".join(map(str, server.version)))
        if server.eviction != "noeviction":
            self._logger.warning(
                "Redis may evict jobs silently when it is out of memory; set maxmemory-policy to noeviction",
                maxmemory_policy=server.eviction,
            )
        needed = worker_commands() + (() if self._config.metrics_port is None else metrics_commands())
        if self._config.broker_url.kind == "cluster":
            needed += CLUSTER
        check_permissions(self._client, self._keys[0], needed)
        self._check_connections(server)
        max_events = self._config.max_events
        self._client.run_many(
            [call for keys in self._keys for call in write_queue_meta(keys, PROTOCOL_VERSION, max_events)]
        )
        self._check_hash_tags()
        for keys, version in zip(self._keys, read_queue_versions(self._client, self._keys), strict=True):
            self._check_other_versions(keys, version)

    def _check_connections(self, server: ServerSettings) -> None:
        """Check that this worker's connections do not shut other clients out.

        Raises:
            BrokerConfigError: They would.
        """
        self.max_clients = server.max_clients
        if server.max_clients is None or server.max_clients - server.connected >= self._connections:
            return
        raise BrokerConfigError(
            f"This worker needs {self._connections} connections, but Redis at {self._client.safe_url} allows "
            f"{server.max_clients} (maxclients), and {server.connected} clients are connected: raise maxclients, "
            "reduce worker_concurrency, or start fewer workers"
        )

    def _check_scripts(self) -> bool:
        """Check all Lua scripts now: if a modified script were noticed later, outcomes could not be written."""
        try:
            loader.all_scripts()
        except ScriptIntegrityError as exc:
            self._logger.error("A Lua script in the bulltask package was modified", error=str(exc))  # noqa: TRY400
            return False
        return True

    def _check_lock_settings(self) -> None:
        if self._config.renew_ms > self._config.lock_ms // 2:
            self._logger.warning(
                "lock_renew_time is more than half of lock_duration: reduce it, or a few failed renewals lose a lock",
                lock_renew_time=self._config.renew_ms / 1000,
                lock_duration=self._config.lock_ms / 1000,
            )

    def _check_environment(self) -> None:
        """Warn about misspelled environment variables, which would otherwise be ignored silently."""
        for variable in sorted(os.environ):
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name in SETTINGS or not variable.startswith(ENV_PREFIX) or variable.startswith(NON_SETTING_VARIABLES):
                continue
            celery = CELERY_SETTINGS.get(name)
            hint = f": {celery.reason}" if celery else did_you_mean(name, SETTINGS)
            self._logger.warning(f"An environment variable matches no setting and is ignored{hint}", variable=variable)

    def _check_hash_tags(self) -> None:
        """Warn about jobs in ``{emails}`` if this worker processes ``emails``, and vice versa: these are two queues."""
        tagged = self._config.queue_hash_tag
        processed = [keys for keys in self._keys if "{" not in keys.queue]
        others = [QueueKeys(keys.prefix, bullmq_name(keys.queue, hash_tag=not tagged)) for keys in processed]
        try:
            counts = count_unfinished_jobs(self._client, others)
        except BrokerAuthError:  # a user for these queues may not read the other ones, and needs not
            return
        for keys, other, jobs in zip(processed, others, counts, strict=True):
            if jobs:
                self._logger.warning(
                    f"Jobs are waiting in the queue of the same name {'without' if tagged else 'with'} a hash tag, "
                    "which this worker does not process; if other clients use that name, set "
                    f"queue_hash_tag={not tagged} (BULLTASK_QUEUE_HASH_TAG)",
                    queue=keys.queue,
                    processed=keys.base,
                    other=other.base,
                    jobs=jobs,
                )

    def _check_other_versions(self, keys: QueueKeys, version: str) -> None:
        """Warn about BullMQ 6 clients, which pause queues differently: mixed with BullMQ 5, jobs can be lost."""
        if (match := _BULLMQ.match(version)) and int(match[1]) > 5:
            self._logger.warning(
                "A client with BullMQ 6 or newer is using this queue. If the queue is paused, resume it only with "
                "bulltask or with that client: if a BullMQ 5 client resumes it, jobs may be lost "
                "(docs/reference/mixed-versions.md)",
                queue=keys.queue,
                version=version,
            )
