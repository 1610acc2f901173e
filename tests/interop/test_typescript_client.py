"""The TypeScript client of ``bulltask gen-ts``: tsc compiles it, and Node.js calls Python with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bulltask.jobs.payloads import is_envelope
from tests.interop.conftest import HERE
from tests.support.payloads import ENCRYPTION_KEY
from tests.support.programs import ROOT
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.interop, pytest.mark.process]

APP = """
from bulltask import App
from tests.support.typed_tasks import register

app = App("shop")
register(app)


@app.task(name="greet", queue="mail", priority=5, expires=60, max_retries=4, time_limit=30, keep_logs=7)
def greet({parameters}, greeting: str = "Hello") -> str:
    \"\"\"Greet a person. */ It is polite.\"\"\"
    return f"{{greeting}}, {{{first}}}"


from typing import NamedTuple


class Place(NamedTuple):
    x: float
    y: float = 2


@app.task(name="move", typed=True)
def move(place: Place) -> Place:
    return place


@app.task(name="silent", ignore_result=True)
def silent() -> int:
    return 1


@app.task(name="long", compression="zlib")
def long() -> str:
    return "x" * 10_000


@app.task(name="charge", queue="payments", compression="zlib")
def charge(card: str, times: int = 1) -> list[str]:
    return [card] * times
"""
PROGRAM = """
import { Client, type Tasks } from "./client.js";

const keys = { payments: process.argv[3] };
const client = new Client({ connection: { port: Number(process.argv[2]) } }, keys);
const placed = new Date("2026-11-23T10:30:00Z").toISOString();
const order = { id: "00000000-0000-0000-0000-000000000007", placed, items: [{ sku: "tea", price: "2.50", count: 2 }] };
const receipt = await client.call("shop.checkout", { order, terms: "P1D" }, {}, 60_000);
const total: string = receipt.total;
const address = { street: "Main 1", postCode: "12345" };
const moved = await client.call("shop.move", { cards: [{ number: "1", holder: address }] }, {}, 60_000);
const job = await client.add("greet", { person: "Ada" });
const place: [number, number?] = await client.call("move", { place: [3] }, {}, 60_000);
const nothing: null = await client.call("silent", {}, {}, 60_000);
const long: string = await client.call("long", {}, { jobId: "first" }, 60_000);
const cards: string[] = await client.call("charge", { card: "4242", times: 5_000 }, {}, 60_000);
const charge = await client.add("charge", { card: "4711" });
const { card } = client.read("charge", charge, "data");
const stored = await client.queue("long").getJob("first");
const read: string = stored === undefined ? "" : client.read("long", stored, "result");
const without = new Client({ connection: { port: Number(process.argv[2]) } }, {});
const refused = await without.add("charge", { card: "4711" }).catch((error: Error) => error.message);
await without.close();
const wrong = await client.call("shop.strict", { count: 1.5 }).catch((error: Error) => error.message);
console.log(JSON.stringify([total, receipt.lines, moved, job.id, job.queueName, wrong]));
const lengths = [long.length, read.length, cards.length, new Set(cards).size];
console.log(JSON.stringify([place, nothing, lengths, card, charge.id, refused]));
await client.close();

export function rejected(client: Client, receipt: Tasks["shop.checkout"]["result"]): void {
  // @ts-expect-error: there is no such task
  void client.add("shop.check", { order });
  // @ts-expect-error: an argument is missing
  void client.add("shop.checkout", {});
  // @ts-expect-error: an argument has another type
  void client.add("shop.loose", { count: "1" });
  // @ts-expect-error: an optional argument has another name
  void client.add("shop.loose", { count: 1, tag: [] });
  // @ts-expect-error: a field of a dataclass is missing
  void client.add("shop.checkout", { order: { id: "1", placed: "" } });
  // @ts-expect-error: it is not a member of the enum
  void client.add("shop.checkout", { order: { ...order, shipping: "fast" } });
  // @ts-expect-error: the result has another type
  const total: number = receipt.total;
  void total;
  // @ts-expect-error: the keys of the encrypted queue are missing
  void new Client({ connection: {} });
  // @ts-expect-error: the queue is not encrypted
  void new Client({ connection: {} }, { mail: "k1:" });
  // @ts-expect-error: the job of an encrypted queue contains an envelope
  void client.add("charge", { card: "1" }).then((job) => job.data.card);
  // @ts-expect-error: so does a large result that is compressed
  void client.add("long", {}).then((job) => job.returnvalue.length);
}
"""
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "BULLTASK_PAYLOAD_ENCRYPTION_KEYS": json.dumps({"payments": ENCRYPTION_KEY}),
}
CONFIG = {
    "compilerOptions": {
        "target": "es2022",
        "module": "nodenext",
        "strict": True,
        "exactOptionalPropertyTypes": True,
        "noUncheckedIndexedAccess": True,
        "noUnusedLocals": True,
        "verbatimModuleSyntax": True,
        "skipLibCheck": True,
        "types": ["node"],
    }
}


@pytest.fixture
def project(node_client: None, tmp_path: Path) -> Path:
    """A directory for TypeScript with two clients: in the second, an argument of a task has another name."""
    project = tmp_path / "project"
    for name, parameter in (("now", "person"), ("renamed", "name")):
        (project / name).mkdir(parents=True)
        (project / name / "shop.py").write_text(APP.format(parameters=f"{parameter}: str", first=parameter))
        (project / name / "program.ts").write_text(PROGRAM)
        command = [sys.executable, "-m", "bulltask", "gen-ts", "-A", "shop", "-o", "client.ts"]
        environment = {**os.environ, **ENVIRONMENT}
        subprocess.run(command, cwd=project / name, env=environment, check=True)
    (project / "node_modules").symlink_to(HERE / "node_modules")
    (project / "package.json").write_text(json.dumps({"type": "module"}))
    (project / "tsconfig.json").write_text(json.dumps(CONFIG))
    return project


def test_node_calls_python_with_the_client_and_a_renamed_argument_is_a_compile_error(
    project: Path, harness: WorkerHarness
) -> None:
    compiled = subprocess.run(
        ["node", HERE / "node_modules/typescript/bin/tsc", "-p", "."],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in compiled.stdout.splitlines() if not line.startswith(" ")]
    assert len(errors) == 1, compiled.stdout
    assert errors[0].startswith("renamed/program.ts(")
    assert "'person' does not exist in type" in errors[0]

    source = (project / "now/shop.py").read_text().partition('app = App("shop")')[2]
    imports = "from tests.support.typed_tasks import register\n"
    harness.worker(
        imports + source,
        children=1,
        options=["-Q", "default,payments"],
        environ=ENVIRONMENT,
        settings={"incompatible_timeout": 0},
    )
    port = harness.url.rpartition(":")[2].partition("/")[0]
    run = subprocess.run(
        ["node", "now/program.js", port, ENCRYPTION_KEY],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    total, lines, moved, job_id, queue, wrong = json.loads(run.stdout.splitlines()[0])
    assert (total, lines, queue) == ("5.00", ["2 tea"], "{mail}")
    assert moved == {"00000000-0000-0000-0000-000000000000": {"street": "Main 1", "postCode": "12345", "since": None}}
    assert wrong == (
        "the job's data does not match task shop.strict: count: expected an integer "
        "(the value is hidden, because the app encrypts payloads)"
    )
    assert_like_a_job_of_python(harness, project / "now", job_id)

    *values, charge_id, refused = json.loads(run.stdout.splitlines()[1])
    assert values == [[3, 2], None, [10_000, 10_000, 5_000, 1], "4711"]
    assert refused == 'queue payments is encrypted: pass its keys, new Client(options, { "payments": "…" })'
    stored = harness.redis.hget(harness.keys_of("payments").job(charge_id), "data")
    assert is_envelope(json.loads(str(stored)))


def assert_like_a_job_of_python(harness: WorkerHarness, directory: Path, job_id: str) -> None:
    """Compare the options of the client's job with those of a job that Python sent."""
    app = harness.sender()
    namespace = {"__name__": "shop", "app": app}
    source = (directory / "shop.py").read_text().partition("@app.task")
    exec(compile(source[1] + source[2], "shop.py", "exec"), namespace)
    own = app.send_task("greet", ("Ada",))
    keys = harness.keys_of("mail")
    nodes, pythons = (json.loads(harness.redis.hget(keys.job(id_), "opts")) for id_ in (job_id, own.id))  # type: ignore[arg-type]
    assert 0 <= pythons["bulltask"].pop("expires") - nodes["bulltask"].pop("expires") < 60_000
    assert pythons["bulltask"].pop("sender").startswith("sender@")
    assert nodes == pythons
