"""Clients of redis-py for the servers of the tests: a single server, a Redis Cluster, or a primary behind Sentinels."""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import redis
from redis.cluster import ClusterNode
from redis.sentinel import Sentinel

__all__ = ["client_of"]


def client_of(url: str, **options: Any) -> redis.Redis:
    """Return a client for a broker URL.

    Args:
        url: ``redis://``, ``redis+cluster://HOST:PORT,…`` or ``redis+sentinel://HOST:PORT,…/SERVICE``,
            optionally with ``sentinel_password``.
        options: Options of ``redis.Redis``.

    Returns:
        A client with the methods of ``redis.Redis``, even for a cluster. There, methods for a single server
        (``info``, ``config_set``) skip the test, ``client_list`` returns the connections to all primaries, and users
        are created and deleted on all of them.
    """
    scheme = url.partition("://")[0]
    if scheme == "redis+cluster":
        nodes = [ClusterNode(host, port) for host, port in _hosts(url)]
        return cast("redis.Redis", _ClusterClient(startup_nodes=nodes, **_credentials(url), **options))
    if scheme == "redis+sentinel":
        parts = urlsplit(url)
        more = {name: values[0] for name, values in parse_qs(parts.query).items()}
        asked = Sentinel(_hosts(url), sentinel_kwargs={"password": more.get("sentinel_password"), "socket_timeout": 10})
        try:
            host, port = asked.discover_master(parts.path.strip("/"))
        finally:
            for sentinel in asked.sentinels:
                sentinel.close()
        # Not master_for(): it would ask the sentinels again for each connection, and close none of theirs.
        return redis.Redis(host, port, db=int(more.get("db", 0)), **_credentials(url), **options)
    return redis.Redis.from_url(url, **options)


class _ClusterClient(redis.RedisCluster):
    """A cluster client whose methods without a key apply to all primaries."""

    def keys(self, pattern: Any = "*", **_: Any) -> Any:
        """Return the keys on all primaries."""
        return super().keys(pattern, target_nodes=redis.RedisCluster.PRIMARIES)

    def dbsize(self, **_: Any) -> Any:
        """Return the number of keys on all primaries."""
        return super().dbsize(target_nodes=redis.RedisCluster.PRIMARIES)

    def acl_deluser(self, *users: str, **_: Any) -> Any:
        """Delete users on all primaries."""
        return super().acl_deluser(*users, target_nodes=redis.RedisCluster.PRIMARIES)

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Execute a command; create users on all primaries."""
        if args[0] == "ACL SETUSER" or args[:2] == ("ACL", "SETUSER"):
            return super().execute_command("ACL SETUSER", *args[1 + (args[0] == "ACL") :], target_nodes="primaries")
        return super().execute_command(*args, **options)

    def client_list(self, *_: Any, **__: Any) -> Any:
        """Return the connections to all primaries; each id begins with the address of the node, so it is unique."""
        lists: Any = super().client_list(target_nodes=redis.RedisCluster.PRIMARIES)
        return [{**one, "id": f"{node} {one['id']}"} for node, found in lists.items() for one in found]


def _skip(*_: Any, **__: Any) -> Any:
    pytest.skip("the test concerns one server")


for _name in "acl_log client_kill_filter config_resetstat config_set info monitor replicaof".split():
    setattr(_ClusterClient, _name, _skip)


def _hosts(url: str) -> list[tuple[str, int]]:
    hosts = urlsplit(url).netloc.rpartition("@")[2].split(",")
    return [(host, int(port)) for host, _, port in (host.rpartition(":") for host in hosts)]


def _credentials(url: str) -> dict[str, Any]:
    userinfo = urlsplit(url).netloc.rpartition("@")[0]
    user, _, password = userinfo.partition(":")
    return {"username": unquote(user), "password": unquote(password)} if userinfo else {}
