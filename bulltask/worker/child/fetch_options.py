"""The options of a child's fetches."""

from __future__ import annotations

from bulltask.config.config import Config
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.fetch import FetchOptions

__all__ = ["FetchOptionsCache"]


class FetchOptionsCache:
    """Caches the fetch options for each slot and queue, because they are the same in every call.

    Args:
        config: The worker's settings.
        worker_id: Stored in each job as the worker that processes it.
    """

    def __init__(self, config: Config, worker_id: str) -> None:
        self._config, self._worker_id = config, worker_id
        self._cache: dict[tuple[str, str], FetchOptions] = {}

    def get(self, keys: QueueKeys, token: str) -> FetchOptions:
        """Return the options for a queue, with a slot's token."""
        options = self._cache.get((keys.base, token))
        if options is None:
            options = FetchOptions.from_config(self._config, keys, token, self._worker_id)
            self._cache[keys.base, token] = options
        return options
