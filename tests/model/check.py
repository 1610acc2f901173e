"""Runs Spin on ``worker.pml``: generates, compiles and runs a verifier for each scenario."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["CORRECT", "QUICK", "WRONG", "Result", "Scenario", "check", "missing_programs"]

MODEL: Final = Path(__file__).with_name("worker.pml")
LIVENESS: Final = "every_job_finishes"
_MAX_DEPTH: Final = 1_000_000
_MEMORY_MB: Final = 1_000
_TIMEOUT_S: Final = 300


@dataclass(frozen=True, slots=True)
class Scenario:
    """A variant of the model, and the expected result of its check.

    Attributes:
        name: Shown in the output; for a wrong variant, the macro that selects it.
        bounds: Macros that limit the model: the numbers of jobs, slots and faults.
        expected: The properties of which a wrong variant must violate one; empty if all properties must hold.
        liveness: Whether to check that every job finishes, instead of the other properties.
    """

    name: str
    bounds: str
    expected: tuple[str, ...] = ()
    liveness: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What Spin found.

    Attributes:
        violated: The violated property, ``""`` if there is none.
        states, depth: How many states there are, and the longest path.
        complete: Whether all states were explored.
        output: The verifier's output.
    """

    violated: str
    states: int
    depth: int
    complete: bool
    output: str


CORRECT: Final = (
    Scenario("no fault", "RETRIES=1"),
    Scenario("no fault, 3 jobs", "JOBS=3"),
    Scenario("no fault, 3 jobs, 3 slots", "JOBS=3 SLOTS=3"),
    Scenario("a lost reply", "LOST_REPLIES=1 RETRIES=1"),
    Scenario("a killed child", "CHILD_KILLS=1"),
    Scenario("a killed child, 3 jobs", "JOBS=3 CHILD_KILLS=1"),
    Scenario("a killed worker", "WORKER_KILLS=1"),
    Scenario("an expired lock", "EXPIRIES=1"),
    Scenario("a poison pill", "POISON=1"),
    Scenario("a killed child, a lost reply", "CHILD_KILLS=1 LOST_REPLIES=1"),
    Scenario("every job finishes: killed worker", "WORKER_KILLS=1", liveness=True),
    Scenario("every job finishes: poison pill", "POISON=1", liveness=True),
)

WRONG: Final = (
    Scenario("FINISH_WITHOUT_TOKEN", "EXPIRIES=1", ("one_owner",)),
    Scenario("FINISH_UNCHECKED", "EXPIRIES=1", ("one_outcome", "one_place")),
    Scenario("RELEASE_IN_TWO_CALLS", "LOST_REPLIES=1", ("one_place",)),
    Scenario("ONE_PASS", "EXPIRIES=1", ("stall_grace",)),
    Scenario("RENEW_KEEPS_MARK", "EXPIRIES=1", ("stall_grace",)),
    Scenario("REACQUIRE_FINISHED", "", ("lock_only_active",)),
    Scenario("RENEW_RELEASED_SLOTS", "EXPIRIES=1 RETRIES=1", ("reacquired_by_holder",)),
    Scenario("TAKEOVER_WITHOUT_LOCK", "", ("single_run",)),
    Scenario("NO_RELEASING_MARK", "LOST_REPLIES=1", ("starts_counted",)),
    Scenario("START_RELEASED", "JOBS=3", ("single_run", "starts_counted")),
    Scenario("RELEASE_KEEPS_START", "", ("prefetch_is_free",)),
    Scenario("COUNT_CRASHES_WITHOUT_TOKEN", "CHILD_KILLS=1 LOST_REPLIES=1", ("crash_counted_once",)),
    Scenario("PREFETCHED_COUNTS_CRASH", "CHILD_KILLS=1", ("crash_counted_once",)),
    Scenario("NO_CRASH_LIMIT", "POISON=1", ("crash_limit",)),
    Scenario("NO_STALLED_CHECK", "WORKER_KILLS=1", (LIVENESS,), liveness=True),
)

QUICK: Final = ("no fault", "a killed child", "REACQUIRE_FINISHED", "TAKEOVER_WITHOUT_LOCK")


def missing_programs() -> list[str]:
    """Return the programs that are needed, but not installed."""
    return [program for program in ("spin", "gcc") if shutil.which(program) is None]


def check(scenario: Scenario) -> Result:
    """Check a scenario."""
    with tempfile.TemporaryDirectory(prefix="bulltask-model-") as folder:
        macros = [f"-D{bound}" for bound in scenario.bounds.split()]
        if scenario.expected:
            macros.append(f"-D{scenario.name}")
        if scenario.liveness:
            macros.append("-DLIVENESS")
        _run(folder, "spin", *macros, "-a", str(MODEL))
        kind = ["-DNFAIR=3"] if scenario.liveness else ["-DSAFETY"]
        _run(folder, "gcc", "-w", "-DCOLLAPSE", f"-DMEMLIM={_MEMORY_MB}", *kind, "-o", "pan", "pan.c")
        search = ["-a", "-f", "-A"] if scenario.liveness else ["-E"]
        output = _run(folder, "./pan", *search, f"-m{_MAX_DEPTH}", "-n", "-w22")
    return parse(output, liveness=scenario.liveness)


def parse(output: str, *, liveness: bool) -> Result:
    """Return what a verifier has printed."""
    violated = ""
    if found := re.search(r"assertion violated (\w+)", output):
        violated = found[1]
    elif "acceptance cycle" in output and "errors: 0" not in output:
        violated = LIVENESS
    states = re.search(r"(\d+) states, stored", output)
    depth = re.search(r"depth reached (\d+)", output)
    complete = not re.search(r"Search not completed|max search depth too small|out of memory", output)
    if states is None or depth is None:
        raise RuntimeError(f"the verifier printed no result:\n{output}")
    return Result(violated, int(states[1]), int(depth[1]), complete, output)


def _run(folder: str, *command: str) -> str:
    """Run a command; return its output. Raises an error with the output if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr
