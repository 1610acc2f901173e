"""The Node.js helper in examples/node decrypts what bulltask has encrypted, and vice versa."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis

from bulltask import App
from bulltask.config.settings import Settings
from bulltask.jobs.job import JobRef, RunningJob, StoredOptions
from bulltask.jobs.payloads import PayloadCodec, PayloadFormat
from bulltask.testing.worker import wait_until
from tests.interop.node_program import node_program
from tests.support.payloads import ENCRYPTION_KEY
from tests.support.programs import ROOT

pytestmark = pytest.mark.interop

HELPER = ROOT / "examples/node/payload.js"
PROGRAM = """
import { decrypt, encrypt, readKeys } from 'HELPER';
const { keys: text, opened, owner, made } = JSON.parse(process.argv[1]);
const keys = readKeys(text);
let refused = '';
try { decrypt(opened, keys, 'arguments', '{mail}', 'other'); } catch (error) { refused = error.message; }
console.log(JSON.stringify({
  opened: decrypt(opened, keys, 'arguments', '{mail}', owner),
  plain: encrypt(made, keys, 'arguments', '{mail}', owner),
  zipped: encrypt(made, keys, 'result', '{mail}', '7', true),
  refused,
}));
"""
VALUE = {"text": "ä😀\u2028", "items": [1, None, {"x": 1.5}], "long": "x" * 10_000}
COMPLETED = "bull:{payments}:completed"
TASK = 'send "mail"\u2028ä'


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_encrypted_payloads_pass_between_node_and_python(node_client: None, compression: Any) -> None:
    codec = PayloadCodec(Settings({"payload_encryption_keys": {"mail": ENCRYPTION_KEY}}, {}).freeze())
    data = codec.dump_arguments(VALUE, "mail", TASK, PayloadFormat("json", compression), "it")
    given = {"keys": ENCRYPTION_KEY, "opened": json.loads(data), "owner": TASK, "made": VALUE}
    program = PROGRAM.replace("HELPER", HELPER.as_uri())
    node = [shutil.which("node") or "node", "--input-type=module", "-e", program, json.dumps(given)]
    found = json.loads(subprocess.run(node, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert found["opened"] == VALUE
    assert found["refused"]
    data = json.dumps(found["plain"], separators=(",", ":")).encode()
    job = RunningJob("mail", "1", TASK, data, StoredOptions(), 0, 0, 0, 1, "", "", None)
    assert codec.load_arguments(job).value == VALUE
    zipped = json.dumps(found["zipped"], separators=(",", ":"))
    assert "zlib" in zipped
    assert codec.load_result(JobRef("mail", "7"), zipped).value == VALUE


def test_the_documented_node_program_processes_an_encrypted_queue(
    node_client: None, broker_url: str, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/how-to/serializers.md").read_text()
    (program,) = re.findall(r"^```js\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    for file in (HELPER, HELPER.with_name("package.json")):
        shutil.copy(file, tmp_path)
    monkeypatch.setenv("PAYMENTS_KEYS", ENCRYPTION_KEY)
    app = App("sender", broker_url, payload_encryption_keys={"payments": ENCRYPTION_KEY})
    with node_program(program, broker_url, tmp_path):
        assert app.send_task("charge", kwargs={"card": "4000"}, queue="payments").get(timeout=60) == {"charged": "4000"}
        wait_until(lambda: redis_client.zcard(COMPLETED) == 2, 60, "the job that the program has sent")
        job_ids = [str(job_id) for job_id in redis_client.zrange(COMPLETED, 0, -1)]
    results = [app.result(job_id, "payments").get(timeout=0)["charged"] for job_id in job_ids]
    app.close()
    assert sorted(results) == ["4000", "4242"]
    for job_id in job_ids:
        stored = redis_client.hmget(f"bull:{{payments}}:{job_id}", ["data", "returnvalue"])
        assert all('"enc":"e1"' in str(payload) for payload in stored)
