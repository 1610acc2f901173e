"""docs/reference/bullmq-methods.md lists every member of Node's classes that bulltask lacks, or names differently."""

from __future__ import annotations

import re

import pytest

from bulltask.jobs.schedules import Rule
from bulltask.queue import AddOptions, AsyncFlowProducer, FlowProducer, Job, Queue
from bulltask.queue.sync.repeatables import Repeatables
from bulltask.queue.sync.schedulers import JobSchedulers
from tests.interop.conftest import HERE
from tests.support.programs import ROOT

pytestmark = pytest.mark.interop

DECLARATIONS = HERE / "node_modules" / "bullmq" / "dist" / "esm"
CLASSES = {
    "Queue": [("queue", "Queue"), ("queue-getters", "QueueGetters"), ("queue-base", "QueueBase")],
    "Job": [("job", "Job")],
    "FlowProducer": [("flow-producer", "FlowProducer")],
    "JobScheduler": [("job-scheduler", "JobScheduler")],
    "Repeat": [("repeat", "Repeat")],
}
BULLTASK_CLASSES: dict[str, type] = {
    "Queue": Queue,
    "Job": Job,
    "FlowProducer": FlowProducer,
    "JobScheduler": JobSchedulers,
    "Repeat": Repeatables,
}
NOT_FOR_USERS = {"add_planned", "assign", "change", "context"}
"""Members that are public only for the rest of bulltask."""


def without_comments(path: str) -> str:
    return re.sub(r"/\*.*?\*/", "", (DECLARATIONS / path).read_text(), flags=re.DOTALL)


def declared(file: str, name: str) -> set[str]:
    """Return the public members of a class in Node's type declarations."""
    body = re.split(rf"^export declare class {name}\b", without_comments(f"classes/{file}.d.ts"), flags=re.MULTILINE)[1]
    member = r"^    (?!private|protected)(?:(?:static|readonly|get) )*(\w+)\??[<(:]"
    return set(re.findall(member, body.partition("\n}")[0], re.MULTILINE)) - {"constructor"}


def options(file: str, *names: str) -> set[str]:
    """Return the fields of interfaces."""
    declared_names: set[str] = set()
    for name in names:
        kind = rf"^(?:export )?(?:declare )?(?:interface {name}\b|type {name} = )"
        body = re.split(kind, without_comments(file), flags=re.MULTILINE)[1].partition("\n}")[0]
        declared_names |= set(re.findall(r"^    (\w+)\??:", body, re.MULTILINE))
    return declared_names


def rows(name: str) -> list[list[str]]:
    text = (ROOT / "docs/reference/bullmq-methods.md").read_text()
    section = re.split(rf"^`{name}`[^|\n]*:$", text, flags=re.MULTILINE)[1]
    section = re.split(r"^(?:`\w+`|## )", section, maxsplit=1, flags=re.MULTILINE)[0]
    return [
        line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ") and "5.62" not in line
    ]


def names_in_table(name: str) -> set[str]:
    """Return Node's names in a table."""
    cells = [row[0] for row in rows(name) if " of `" not in row[0]]
    return {word for cell in cells for word in re.findall(r"`(\w+)`", cell)}


def in_snake_case(name: str) -> str:
    return re.sub(r"([A-Z])", lambda capital: f"_{capital[1].lower()}", name)


def declared_members(name: str) -> set[str]:
    return {member for file, declaring in CLASSES[name] for member in declared(file, declaring)}


@pytest.mark.parametrize("name", CLASSES)
def test_the_table_lists_all_members_of_bullmqs_class_that_are_not_bulltasks_in_snake_case(
    node_client: None, name: str
) -> None:
    declared_names = declared_members(name)
    assert len(declared_names) >= 5, "the declarations could not be read"
    assert names_in_table(name) <= declared_names
    others = {member for member in declared_names if not hasattr(BULLTASK_CLASSES[name], in_snake_case(member))}
    assert others - names_in_table(name) == set()


def test_every_option_of_bullmqs_queue_is_in_the_table(node_client: None) -> None:
    declared_names = options("interfaces/queue-options.d.ts", "QueueBaseOptions", "QueueOptions")
    assert "defaultJobOptions" in declared_names
    assert names_in_table("QueueOptions") == declared_names


def test_every_job_option_of_bullmq_is_supported_or_in_the_table(node_client: None) -> None:
    declared_names = options("interfaces/base-job-options.d.ts", "DefaultJobOptions", "BaseJobOptions")
    declared_names |= options("types/job-options.d.ts", "CompressableJobOptions")
    assert {"attempts", "deduplication", "failParentOnFailure"} <= declared_names
    unknown = {name for name in declared_names if in_snake_case(name) not in AddOptions.__annotations__}
    assert unknown == names_in_table("JobsOptions")


def test_the_table_lists_the_scheduler_options_of_bullmq_and_bulltask(node_client: None) -> None:
    declared_names = options("interfaces/repeat-options.d.ts", "RepeatOptions")
    declared_names |= options("../../../cron-parser/types/common.d.ts", "ParserOptions") - {"iterator"}
    assert {"pattern", "tz"} <= declared_names
    assert names_in_table("RepeatOptions") == declared_names
    named = {word for row in rows("RepeatOptions") for word in re.findall(r"`([a-z]+)`", row[1])}
    assert named == Rule.__annotations__.keys()


@pytest.mark.parametrize("name", BULLTASK_CLASSES)
def test_the_table_lists_all_members_of_bulltasks_class_that_are_not_bullmqs(node_client: None, name: str) -> None:
    kind = BULLTASK_CLASSES[name]
    named = {word for row in rows(name) for word in re.findall(r"`([a-z_]+)[`(]", row[1])}
    same = {in_snake_case(member) for member in declared_members(name) - names_in_table(name)}
    public = {word for word in dir(kind) if not word.startswith("_")} - NOT_FOR_USERS
    others = {"with", "default_job_options", "self", "schedulers", "queue_defaults", "key", "redis", "prefix"}
    assert {word for word in named if not hasattr(kind, word)} <= others
    assert public - named - same == set()


def test_both_flow_producers_have_the_same_methods() -> None:
    assert {name for name in dir(FlowProducer) if not name.startswith("_")} == {
        name for name in dir(AsyncFlowProducer) if not name.startswith("_")
    }
