"""What a child takes jobs with: the same at every call, so it is made once for each slot and queue."""

from __future__ import annotations

from bulltask.config.config import Config
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.move import FetchOptions

__all__ = ["Claims"]


class Claims:
    """Responsible for a child's claims.

    Args:
        config: the worker's options that travel with each call.
        worker_id: written into each job as who processes it.
    """

    def __init__(self, config: Config, worker_id: str) -> None:
        self._config, self._worker_id = config, worker_id
        self._made: dict[tuple[str, str], FetchOptions] = {}

    def of(self, keys: QueueKeys, token: str) -> FetchOptions:
        """The claim to jobs of a queue under a slot's token."""
        claim = self._made.get((keys.base, token))
        if claim is None:
            claim = self._made[keys.base, token] = FetchOptions.from_config(self._config, keys, token, self._worker_id)
        return claim
