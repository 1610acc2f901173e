"""The queues that exist in Redis."""

from __future__ import annotations

from bulltask.app import App
from bulltask.jobs.names import name_in_app
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scan import scan_all
from bulltask.transport.scripts.queue import scan_queues

__all__ = ["queues_in_redis"]


def queues_in_redis(app: App, client: SyncClient) -> list[QueueKeys]:
    """Return the keys of all queues that an app's workers can process, ordered by name.

    A queue whose name in Redis has no braces belongs to another app if ``queue_hash_tag`` is true.
    """
    names = scan_all(client, lambda cursor: scan_queues(app.config.prefix, cursor))
    hash_tag = app.config.queue_hash_tag
    own = {name_in_app(name, hash_tag=hash_tag) for name in names if "{" in name or not hash_tag}
    return [app.broker.keys(name) for name in sorted(own)]
