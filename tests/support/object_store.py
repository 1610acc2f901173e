"""A server with the API of S3 on this machine, by moto, for lakes in object stores."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from tests.support.programs import run_program

__all__ = ["BUCKET", "SECRET", "object_store"]

BUCKET: Final = "lakes"

SECRET: Final = "hunter2-of-a-test"

# A server of its own process: delta-rs holds this process's lock of the interpreter while it waits for an answer.
_SERVER: Final = """
import logging
import sys
import warnings
warnings.simplefilter("ignore")  # moto asks for the packages of all services
logging.disable()
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def object_store() -> Iterator[Mapping[str, str]]:
    """Run a server with an empty bucket `BUCKET`; yield the storage options for it."""
    with run_program(_SERVER) as program:
        url = f"http://127.0.0.1:{int(program.read_line())}"
        urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT"), timeout=30).close()
        yield {
            "AWS_ACCESS_KEY_ID": "id-of-a-test",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
        }
