"""Servers with the API of an object store on this machine, for lakes: of S3 by moto, of Azure by Azurite."""

from __future__ import annotations

import base64
import hmac
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from email.utils import formatdate
from typing import Final

import pytest

from tests.support.programs import ROOT, run_program

__all__ = ["BUCKET", "SECRET", "STORES", "Store", "object_store"]

BUCKET: Final = "lakes"

SECRET: Final = "hunter2ofatest00"
"""Azure's keys are Base64."""

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


_AZURITE: Final = ROOT / ".venv/azurite/node_modules/azurite/dist/src/blob/main.js"


@contextmanager
def _azure_store() -> Iterator[Mapping[str, str]]:
    """Run a server of Azure's kind with an empty container `BUCKET`; yield the storage options for it."""
    command = [shutil.which("node") or "node", str(_AZURITE), "--blobHost=127.0.0.1", "--blobPort=0", "--silent"]
    command += ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    accounts = {"AZURITE_ACCOUNTS": f"account:{SECRET}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | accounts) as server:
        try:
            assert server.stdout is not None
            url = f"{next(line for line in server.stdout if 'successfully listens' in line).split()[-1]}/account"
            _create_container(url)
            yield {
                "AZURE_STORAGE_ACCOUNT_NAME": "account",
                "AZURE_STORAGE_ACCOUNT_KEY": SECRET,
                "AZURE_STORAGE_ENDPOINT": url,
                "ALLOW_HTTP": "true",
            }
        finally:
            server.kill()


def _create_container(url: str) -> None:
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items())]
    signed = "\n".join([*lines, f"/account/account/{BUCKET}", "restype:container"])
    signature = hmac.digest(base64.b64decode(SECRET), signed.encode(), "sha256")
    headers["Authorization"] = f"SharedKey account:{base64.b64encode(signature).decode()}"
    request = urllib.request.Request(f"{url}/{BUCKET}?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(request, timeout=30).close()


Store = Callable[[], AbstractContextManager[Mapping[str, str]]]

STORES: Final = (
    pytest.param(object_store, f"s3a://{BUCKET}", id="s3"),
    pytest.param(
        _azure_store,
        f"abfss://{BUCKET}@account.dfs.core.windows.net",
        id="azure",
        marks=[
            pytest.mark.extended,
            pytest.mark.skipif(not _AZURITE.exists(), reason="make CI=1 externals installs Azurite"),
        ],
    ),
)
"""The stores, each with the URL of its bucket."""
