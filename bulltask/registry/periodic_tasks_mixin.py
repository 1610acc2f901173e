"""``PeriodicTasksMixin``: adds entries to an app's schedule, with Celery's methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from bulltask.clock import Duration
from bulltask.config.config import Settings
from bulltask.errors import ConfigError, InvalidNameError
from bulltask.jobs.names import check_scheduler_id
from bulltask.registry.option_types import CallKeywords
from bulltask.registry.signature import Signature, is_call
from bulltask.registry.task import AnyTask
from bulltask.schedules.crontabs import crontab
from bulltask.signals.signal import Signal
from bulltask.user_warnings import warn_user

__all__ = ["PeriodicTasksMixin"]


class PeriodicTasksMixin:
    """Adds periodic tasks to an app's schedule: a base class of ``App``.

    Attributes:
        on_after_configure, on_after_finalize: Celery's signals, for functions that call :meth:`add_periodic_task`. Each
            is sent once in every process that loads the tasks, after all of them have been imported. Receivers can
            still change settings and the schedule. The sender is the app. An exception in a receiver prevents the
            worker from starting.
        periodic_tasks: The entries that :meth:`add_periodic_task` has added, in the format of ``beat_schedule``.
    """

    conf: Settings

    def __init__(self) -> None:
        super().__init__()
        self.on_after_configure = Signal("on_after_configure")
        self.on_after_finalize = Signal("on_after_finalize")
        self.periodic_tasks: dict[str, dict[str, Any]] = {}
        self._has_set_up = False

    def add_periodic_task(
        self,
        schedule: Duration | crontab | str,
        sig: Signature[Any, Any] | AnyTask[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
        **options: Unpack[CallKeywords[Any]],
    ) -> str:
        """Add an entry to the schedule, in addition to those of ``beat_schedule`` (Celery's ``add_periodic_task``).

        A worker reads the schedule when it starts, so a task cannot add an entry. Use ``app.queue(…).schedulers`` in a
        task.

        Args:
            schedule: Seconds, a ``timedelta``, ``crontab(…)`` or a cron pattern.
            sig: The call, ``task.s(…)``, or a task.
            args, kwargs: Arguments of the call, before and in addition to its own.
            name: The entry's name, which is also its job scheduler's id; an entry with the same name is replaced.
                Default: the call as text, such as ``shop.add(1, 2)``.
            options: As for ``options`` in an entry of ``beat_schedule``.

        Returns:
            The entry's name.

        Raises:
            TypeError: ``sig`` is neither a signature nor a task, has callbacks, or does not match its task.
            ConfigError: The name is not valid as the id of a job scheduler.
        """
        call = _call(sig, args, kwargs)
        key = name or repr(call)
        try:
            check_scheduler_id(key)
        except InvalidNameError as exc:
            raise ConfigError(f"{exc}" if name else f"{exc}; pass a name=") from None
        given: dict[str, Any] = {**call.given, **options}
        entry = {"task": call.task.name, "schedule": schedule, "args": call.args, "kwargs": call.kwargs}
        entry["options"] = given
        if name is None and self.periodic_tasks.get(key, entry) != entry:
            warn_user(
                f"the periodic task {key!r:.200} replaces another one with the same call; pass a name= to keep both"
            )
        self.periodic_tasks[key] = entry
        return key

    def set_up_periodic_tasks(self) -> None:
        """Call the receivers of ``on_after_configure`` and ``on_after_finalize``, unless this was done before.

        Raises:
            Exception: A receiver raised it. If bulltask ignored it, the worker would remove the schedules that the
                receiver adds.
        """
        if self._has_set_up:
            return
        for receiver in self.on_after_configure.receivers(self):
            receiver(signal=self.on_after_configure, sender=self, source=self.conf)
        for receiver in self.on_after_finalize.receivers(self):
            receiver(signal=self.on_after_finalize, sender=self)
        self._has_set_up = True


def _call(sig: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Signature[Any, Any]:
    if isinstance(sig, AnyTask):
        return sig.signature(args, kwargs)
    if not is_call(sig):
        raise TypeError(
            f"a periodic task is a call such as task.s(…), not {sig!r:.200}; for a chain or group, schedule "
            "a task that "
            "sends it"
        )
    if sig.links or sig.errbacks:
        raise TypeError(f"{sig!r:.200} has callbacks, which a schedule cannot store; send them from the task")
    return sig.clone(args, kwargs)
