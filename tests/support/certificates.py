"""Certificates for a test session, and the server arguments and URLs that use them."""

from __future__ import annotations

from pathlib import Path

import trustme

from bulltask.embedded.server import pick_port
from bulltask.testing.worker import RedisServer

__all__ = ["Certificates", "TlsServer"]


class Certificates:
    """A CA, certificates for local servers and clients, and a client certificate from an untrusted CA.

    Args:
        directory: The directory for the files.

    Attributes:
        authority: The file for ``ssl_ca_certs`` and ``tls-ca-cert-file``.
        untrusted_authority: The file for another authority.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        trusted, untrusted = self._trusted, _ = trustme.CA(), trustme.CA()
        self.authority, self.untrusted_authority = directory / "authority.pem", directory / "untrusted-authority.pem"
        trusted.cert_pem.write_to_path(str(self.authority))
        untrusted.cert_pem.write_to_path(str(self.untrusted_authority))
        self.renew()
        self._issue(untrusted, "stranger", "stranger@example.org")

    def renew(self) -> None:
        """Replace the certificates of servers and clients by new ones from the same CA."""
        self._issue(self._trusted, "server", "localhost", "127.0.0.1")
        self._issue(self._trusted, "client", "client@example.org")

    def file(self, name: str) -> Path:
        """Return the path of ``server.pem``, ``client.key``, ``stranger.pem`` …"""
        return self._directory / name

    def query(self, client: str = "client") -> str:
        """Return the query string of a client's URL."""
        pair = f"ssl_certfile={self.file(client + '.pem')}&ssl_keyfile={self.file(client + '.key')}"
        return f"ssl_ca_certs={self.authority}&{pair}"

    def arguments(self, port: int) -> list[str]:
        """Return server arguments for TLS on ``port`` with required client certificates."""
        files = {"cert": self.file("server.pem"), "key": self.file("server.key"), "ca-cert": self.authority}
        return ["--tls-port", str(port), *(word for name in files for word in (f"--tls-{name}-file", str(files[name])))]

    def _issue(self, authority: trustme.CA, name: str, *identities: str) -> None:
        issued = authority.issue_cert(*identities)
        issued.private_key_pem.write_to_path(str(self.file(f"{name}.key")))
        issued.cert_chain_pems[0].write_to_path(str(self.file(f"{name}.pem")))


class TlsServer:
    """A Redis server with a plain port, and a TLS port that requires client certificates.

    Args:
        directory: The directory for the server's files.
        certificates: The certificates of the server.

    Attributes:
        plain: The server.
        port: The TLS port.
        url: The URL of the TLS port, with the client's certificate.
    """

    def __init__(self, directory: Path, certificates: Certificates) -> None:
        self.port = pick_port()
        # The wheel's Valkey is built without TLS.
        self.plain = RedisServer.start(directory, flavor="redis", extra=certificates.arguments(self.port))
        self.url = f"rediss://localhost:{self.port}/0?{certificates.query()}"
