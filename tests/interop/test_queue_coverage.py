"""The table of methods in docs/queues.md: all of Node's are in it, and ours exist."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from bulltask.queue.aqueue import AsyncQueue
from bulltask.queue.job import Job
from bulltask.queue.queue import Queue
from tests.interop.conftest import HERE
from tests.support.programs import ROOT

pytestmark = pytest.mark.interop

ASK = """
const bullmq = require("bullmq"), events = require("events").prototype, found = {};
for (const name of ["Queue", "Job"]) {
  found[name] = Object.getOwnPropertyNames(bullmq[name]);
  for (let p = bullmq[name].prototype; p && p !== events && p !== Object.prototype; p = Object.getPrototypeOf(p))
    found[name].push(...Object.getOwnPropertyNames(p));
}
console.log(JSON.stringify(found));
"""
INTERNAL = set(
    """
    constructor length name prototype
    Job addJob base64Name baseGetClients checkConnectionError client clientName commandByType createScripts
    parseClientList redisVersion sanitizeJobTypes trace
    addJobLog asJSONSandbox fromJSON getSpanOperation isInList isInZSet optsAsJSON optsFromJSON shouldRetryJob
    updateStacktrace validateOptions
    """.split()
)
"""Not private in JavaScript, but documented nowhere and used by BullMQ itself."""


def section(name: str) -> str:
    text = (ROOT / "docs/queues.md").read_text().partition("## Every method of BullMQ")[2]
    return text.partition(f"`{name}`:")[2].partition("\n`")[0]


@pytest.mark.parametrize(("name", "kind"), [("Queue", Queue), ("Job", Job)])
def test_every_method_of_nodes_class_is_in_the_table(node_client: None, name: str, kind: type) -> None:
    found = json.loads(subprocess.run(["node", "-e", ASK], cwd=HERE, capture_output=True, check=True).stdout)[name]
    rows = [line.strip("|").split(" | ") for line in section(name).splitlines() if line.startswith("| `")]
    said = {word for row in rows for word in re.findall(r"`(\w+)`", row[0])}
    assert set(found) - INTERNAL - said == set()
    assert said - set(found) == set(), "the table names what Node does not have"


@pytest.mark.parametrize(("name", "kind"), [("Queue", Queue), ("Job", Job), ("Queue", AsyncQueue)])
def test_every_method_of_ours_in_the_table_exists_and_the_table_has_all(name: str, kind: type) -> None:
    rows = [line.strip("|").split(" | ") for line in section(name).splitlines() if line.startswith("| `")]
    said = {word for row in rows for word in re.findall(r"`(\w+)[`(]", row[1]) if word.islower()}
    same = {word for row in rows if row[1].strip(" |") == "the same" for word in re.findall(r"`(\w+)`", row[0])}
    public = {word for word in dir(kind) if not word.startswith("_") and callable(getattr(kind, word))}
    assert {word for word in said if not hasattr(kind, word)} <= {"with", "default_job_options"}
    assert public - said - same <= {"change", "become", "refresh", "result"}
