"""What the sync and the async queue have in common."""

from __future__ import annotations

from bulltask.config.urls import SecretUrl, secret_url
from bulltask.queue.link import Link
from bulltask.queue.options import AddOptions

__all__ = ["QueueBase"]


class QueueBase:
    """A queue by its name, and its way to Redis.

    Args:
        name: the queue, spelled as everywhere in bulltask: ``emails`` is Node's ``{emails}`` unless
            ``queue_hash_tag`` is off.
        broker_url: the server, when there is no app; the environment's ``BULLTASK_BROKER_URL`` wins.
        default_job_options: options of every job that is added here unless it says otherwise.
        link: the queue's way to Redis, where there is an app.
        settings: any other setting of ``bulltask.config.settings``: ``prefix``, ``queue_hash_tag`` …

    Raises:
        ConfigError, InvalidNameError: a setting or the name is wrong.
    """

    def __init__(
        self,
        name: str,
        broker_url: str | SecretUrl | None = None,
        *,
        default_job_options: AddOptions | None = None,
        link: Link | None = None,
        **settings: object,
    ) -> None:
        broker_url = secret_url(broker_url)
        self._link = link or Link.to(name, broker_url, settings, default_job_options)

    @property
    def name(self) -> str:
        """The queue as the user spells it."""
        return self._link.queue

    @property
    def qualified_name(self) -> str:
        """What Node calls the qualified name: ``bull:{emails}``."""
        return self._link.keys.base[:-1]

    @property
    def link(self) -> Link:
        """The queue's way to Redis."""
        return self._link

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"
