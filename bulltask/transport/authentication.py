"""Credentials that may change while a process runs, for redis-py's connections and for ``AUTH`` on open ones."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from redis.credentials import CredentialProvider

from bulltask.config.credentials import Credentials
from bulltask.transport.call import Call, command

__all__ = ["REAUTHENTICATE_MS", "Authentication"]

REAUTHENTICATE_MS: Final = 120_000
"""How long a connection is used before it authenticates again with current credentials.

Microsoft Entra tokens must be replaced 3 minutes before they expire; Microsoft's client library returns a new token 5
minutes before. ElastiCache closes a connection 12 hours after its last authentication.
"""


class Authentication(CredentialProvider):
    """Reads credentials for connections; redis-py calls it whenever it connects.

    Args:
        credentials: The setting.
        user: The user in the URL, ``""`` if there is none.
    """

    def __init__(self, credentials: Credentials, user: str) -> None:
        self._credentials, self._user = credentials, user

    def get_credentials(self) -> Any:
        """Return the arguments of ``AUTH``; raises the errors of ``Credentials.read``."""
        return self._credentials.read(self._user)

    async def get_credentials_async(self) -> Any:
        """:meth:`get_credentials` for asyncio: in a thread, because a provider may wait for its token."""
        return await asyncio.to_thread(self._credentials.read, self._user)

    def call(self) -> Call[Any]:
        """Return the call that authenticates an open connection again; raises the errors of ``Credentials.read``."""
        return command("AUTH", *self.get_credentials())

    async def acall(self) -> Call[Any]:
        """:meth:`call` for asyncio."""
        return command("AUTH", *await self.get_credentials_async())
