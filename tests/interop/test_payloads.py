"""The Node helper of examples/node opens what bulltask has encrypted, and bulltask opens what the helper has made."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from bulltask.config.config import Settings
from bulltask.jobs.job import JobRef, RunningJob
from bulltask.payloads.payload_codec import PayloadCodec, PayloadForm
from tests.support.payloads import ENCRYPTION_KEY
from tests.support.programs import ROOT

pytestmark = pytest.mark.interop

PROGRAM = """
import { make, open, readKeys } from 'HELPER';
const { keys: text, opened, owner, made } = JSON.parse(process.argv[1]);
const keys = readKeys(text);
let refused = '';
try { open(opened, keys, 'arguments', '{mail}', 'other'); } catch (error) { refused = error.message; }
console.log(JSON.stringify({
  opened: open(opened, keys, 'arguments', '{mail}', owner),
  plain: make(made, keys, 'arguments', '{mail}', owner),
  zipped: make(made, keys, 'result', '{mail}', '7', true),
  refused,
}));
"""
VALUE = {"text": "ä😀\u2028", "items": [1, None, {"x": 1.5}], "long": "x" * 10_000}
TASK = 'send "mail"\u2028ä'


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_encrypted_payloads_pass_between_node_and_python(node_client: None, compression: Any) -> None:
    codec = PayloadCodec(Settings({"payload_encryption_keys": {"mail": ENCRYPTION_KEY}}, {}).freeze())
    data = codec.dump_arguments(VALUE, "mail", TASK, PayloadForm("json", compression), "it")
    given = {"keys": ENCRYPTION_KEY, "opened": json.loads(data), "owner": TASK, "made": VALUE}
    program = PROGRAM.replace("HELPER", (ROOT / "examples/node/payload.js").as_uri())
    node = [shutil.which("node") or "node", "--input-type=module", "-e", program, json.dumps(given)]
    found = json.loads(subprocess.run(node, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert found["opened"] == VALUE
    assert found["refused"]
    job = RunningJob(
        "mail", "1", TASK, json.dumps(found["plain"], separators=(",", ":")).encode(), {}, 0, 0, 0, 1, "", "", None
    )
    assert codec.load_arguments(job).value == VALUE
    zipped = json.dumps(found["zipped"], separators=(",", ":"))
    assert "zlib" in zipped
    assert codec.load_result(JobRef("mail", "7"), zipped).value == VALUE
