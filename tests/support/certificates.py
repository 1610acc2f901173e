"""Certificates that are made for a test session, and the words of servers and URLs that use them."""

from __future__ import annotations

from pathlib import Path

import trustme

from bulltask.embedded.launch import pick_port
from bulltask.testing.server import RedisServer

__all__ = ["Certificates", "TlsServer"]


class Certificates:
    """An authority, a certificate of servers on this machine, one of clients, and one that a stranger has signed.

    Args:
        directory: where the files go.

    Attributes:
        authority: the file that ``ssl_ca_certs`` and ``tls-ca-cert-file`` name.
        untrusted_authority: the file of another authority.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        ours, strange = trustme.CA(), trustme.CA()
        self.authority, self.untrusted_authority = directory / "authority.pem", directory / "strange-authority.pem"
        ours.cert_pem.write_to_path(str(self.authority))
        strange.cert_pem.write_to_path(str(self.untrusted_authority))
        self._issue(ours, "server", "localhost", "127.0.0.1")
        self._issue(ours, "client", "client@example.org")
        self._issue(strange, "stranger", "stranger@example.org")

    def file(self, name: str) -> Path:
        """``server.pem``, ``client.key``, ``stranger.pem`` …"""
        return self._directory / name

    def query(self, client: str = "client") -> str:
        """What stands behind the ``?`` of a client's URL."""
        pair = f"ssl_certfile={self.file(client + '.pem')}&ssl_keyfile={self.file(client + '.key')}"
        return f"ssl_ca_certs={self.authority}&{pair}"

    def arguments(self, port: int) -> list[str]:
        """More arguments of a server, which then speaks TLS on ``port``, to clients that have a certificate."""
        files = {"cert": self.file("server.pem"), "key": self.file("server.key"), "ca-cert": self.authority}
        return ["--tls-port", str(port), *(word for name in files for word in (f"--tls-{name}-file", str(files[name])))]

    def _issue(self, authority: trustme.CA, name: str, *identities: str) -> None:
        made = authority.issue_cert(*identities)
        made.private_key_pem.write_to_path(str(self.file(f"{name}.key")))
        made.cert_chain_pems[0].write_to_path(str(self.file(f"{name}.pem")))


class TlsServer:
    """A Redis with two ports: one for TLS, which asks for a client's certificate, and a plain one beside it.

    Args:
        directory: for the server's files.
        certificates: the server's.

    Attributes:
        plain: the server.
        port: the one for TLS.
        url: of that port, with the client's certificate.
    """

    def __init__(self, directory: Path, certificates: Certificates) -> None:
        self.port = pick_port()
        # Valkey's wheel is built without TLS.
        self.plain = RedisServer.start(directory, flavour="redis", extra=certificates.arguments(self.port))
        self.url = f"rediss://localhost:{self.port}/0?{certificates.query()}"
