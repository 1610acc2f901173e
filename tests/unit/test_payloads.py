"""Payloads can be read again, but only in the context they were written for, and with the right keys."""

from __future__ import annotations

import base64
import json
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bulltask import App
from bulltask.config.settings import Settings
from bulltask.errors import ConfigError, DecodeError, EncodeError, PayloadTooLargeError
from bulltask.jobs.codec import has_more_tokens
from bulltask.jobs.job import JobRef, RunningJob, StoredOptions
from bulltask.jobs.payloads import (
    ENVELOPE_KEY,
    Envelope,
    Loaded,
    PayloadCodec,
    PayloadContext,
    PayloadFormat,
    SecretKey,
    describe,
    dump,
    encrypt,
    sign,
)
from tests.support.payloads import ENCRYPTION_KEY, FIRST_KEY, OTHER_ENCRYPTION_KEY, PICKLES, SECOND_KEY, WritesFile

WHAT = "the arguments of task pay"
PICKLED, JSON = PayloadFormat("cloudpickle"), PayloadFormat()


def payloads(**settings: object) -> PayloadCodec:
    return PayloadCodec(Settings(settings, {}).freeze())


def job(data: bytes, task: str = "pay", queue: str = "mail", job_id: str = "1") -> RunningJob:
    return RunningJob(queue, job_id, task, data, StoredOptions(), 0, 0, 0, 1, "", "", None)


def dumped(codec: PayloadCodec, value: object, form: PayloadFormat) -> bytes:
    return codec.dump_arguments(value, "mail", "pay", form, WHAT)


def fields_of(data: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(data)[ENVELOPE_KEY]
    return fields


def changed(data: bytes, **fields: object) -> bytes:
    return json.dumps({ENVELOPE_KEY: {**fields_of(data), **fields}}, separators=(",", ":")).encode()


@dataclass
class Money:
    amount: Decimal


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(),
    lambda items: st.lists(items) | st.dictionaries(st.text(), items),
    max_leaves=8,
)


@given(
    value=JSON_VALUES,
    serializer=st.sampled_from(["json", "cloudpickle"]),
    compression=st.sampled_from([None, "zlib", "zstd"]),
    encrypted=st.booleans(),
    threshold=st.sampled_from([0, 50]),
)
def test_every_value_is_read_as_it_was_written(
    value: Any, serializer: str, compression: str | None, encrypted: bool, threshold: int
) -> None:
    keys = {"*": ENCRYPTION_KEY} if encrypted else None
    codec = payloads(**PICKLES, payload_encryption_keys=keys, compression_threshold=threshold)
    data = dumped(codec, value, PayloadFormat(serializer, compression))
    json.loads(data)  # Node.js and dashboards parse it
    assert codec.load_arguments(job(data)) == Loaded(value, serializer == "cloudpickle")
    ref = JobRef("mail", "1")
    stored = codec.dump_result(value, ref, PayloadFormat(serializer, compression), WHAT).decode()
    assert codec.load_result(ref, stored).value == value


def test_plain_json_has_no_envelope() -> None:
    assert dumped(payloads(), {"x": 1}, JSON) == b'{"x":1}'


def test_json_that_looks_like_an_envelope_is_read_as_it_was_written() -> None:
    value = {ENVELOPE_KEY: {"v": 1, "ser": "json", "body": "e30="}}
    assert payloads().load_arguments(job(dumped(payloads(), value, JSON))).value == value


def test_cloudpickle_supports_functions_and_classes() -> None:
    codec = payloads(**PICKLES)
    loaded = codec.load_arguments(job(dumped(codec, {"f": lambda x: x + 1, "m": Money(Decimal("1.5"))}, PICKLED))).value
    assert (loaded["f"](1), loaded["m"]) == (2, Money(Decimal("1.5")))


def test_a_value_that_cannot_be_pickled_is_not_sent() -> None:
    with pytest.raises(EncodeError, match="the arguments of task pay cannot be pickled: TypeError"):
        dumped(payloads(**PICKLES), {"x": (character for character in "abc")}, PICKLED)


# ---- compression -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zlib", "zstd"])
def test_a_payload_is_compressed_if_its_size_reaches_the_threshold(name: str) -> None:
    codec, form = payloads(compression_threshold=1_000), PayloadFormat("json", name)
    assert dumped(codec, "x" * 997, form) == b'"' + b"x" * 997 + b'"'
    large = dumped(codec, "x" * 998, form)
    assert fields_of(large).keys() == {"v", "ser", "zip", "body"}
    assert len(large) < 120
    assert codec.load_arguments(job(large)).value == "x" * 998


def test_a_payload_that_compression_does_not_shrink_stays_plain() -> None:
    text = base64.b85encode(bytes(range(256)) * 1).decode()
    data = dumped(payloads(compression_threshold=0), text, PayloadFormat("json", "zlib"))
    assert data == json.dumps(text, separators=(",", ":")).encode()


def test_the_payload_limit_applies_to_what_is_stored() -> None:
    codec = payloads(max_payload=2_000, **PICKLES)
    assert len(dumped(codec, "x" * 100_000, PayloadFormat("json", "zstd"))) < 2_000
    with pytest.raises(PayloadTooLargeError, match="bytes as stored exceed the limit of 2,000"):
        dumped(codec, "x" * 1_900, PICKLED)
    with pytest.raises(PayloadTooLargeError, match="before compression exceed the limit of 5,000"):
        dumped(payloads(max_decompressed=5_000), "x" * 6_000, PayloadFormat("json", "zlib"))


BOMB = b'"' + b"x" * 10_000_000 + b'"'


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("zlib", zlib.compress(BOMB)),
        ("zstd", zstandard.ZstdCompressor().compress(BOMB)),
        ("zstd", zstandard.ZstdCompressor(write_content_size=False).compress(BOMB)),
    ],
)
def test_a_small_compressed_payload_cannot_exhaust_memory(name: str, body: bytes) -> None:
    data = Envelope("json", body, name).to_json()
    with pytest.raises(DecodeError, match=r"1,000,000 bytes after decompression|not valid zstd data"):
        payloads(max_decompressed=1_000_000).load_arguments(job(data))


@pytest.mark.parametrize("part", [b"[]", b"{}", b'{"":0}', b'""', b"0", b'"\\""', b"[[0]]"])
@pytest.mark.parametrize("name", ["zlib", "zstd"])
def test_a_small_compressed_payload_cannot_become_many_objects(name: str, part: bytes) -> None:
    body = b"[" + b",".join([part] * 120_000) + b"]"
    packed = zlib.compress(body) if name == "zlib" else zstandard.ZstdCompressor().compress(body)
    data = Envelope("json", packed, name).to_json()
    assert len(data) < 20_000
    reader = payloads(max_decompressed_tokens=100_000)
    tracemalloc.start()
    with pytest.raises(DecodeError, match="has more than 100,000 JSON tokens: raise max_decompressed_tokens"):
        reader.load_arguments(job(data))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(body)
    with pytest.raises(PayloadTooLargeError, match="JSON tokens"):
        dumped(reader, json.loads(body), PayloadFormat("json", name))


@given(JSON_VALUES)
def test_tokens_are_counted_outside_of_strings(value: Any) -> None:
    data = json.dumps([value, ',"[]{}:\\'], separators=(",", ":")).encode()

    def count(part: Any) -> int:
        if isinstance(part, dict):
            return 1 + sum(1 + count(item) for item in part.values()) + max(0, len(part) - 1)
        if isinstance(part, list):
            return 1 + sum(map(count, part)) + max(0, len(part) - 1)
        return int(isinstance(part, str))

    tokens = count(json.loads(data))
    assert not has_more_tokens(data, tokens)
    assert has_more_tokens(data, tokens - 1)


@pytest.mark.parametrize(("name", "body"), [("zlib", zlib.compress(b"1" * 99)[:-5]), ("zstd", b"?"), ("lzma", b"1")])
def test_malformed_compressed_data_is_an_error(name: str, body: bytes) -> None:
    with pytest.raises(DecodeError, match=r"is not valid|does not support"):
        payloads().load_arguments(job(Envelope("json", body, name).to_json()))


# ---- pickles that must not be loaded ---------------------------------------------------------------------------------


Forge = Callable[[PayloadCodec, object], bytes]


def unsigned(_: PayloadCodec, value: object) -> bytes:
    return Envelope("cloudpickle", dump(value, WHAT)).to_json()


def of_unknown_key(_: PayloadCodec, value: object) -> bytes:
    return dumped(
        payloads(**{**PICKLES, "payload_signing_keys": "other:" + FIRST_KEY.partition(":")[2]}), value, PICKLED
    )


def of_another_key(_: PayloadCodec, value: object) -> bytes:
    return dumped(_signing_with("k1:" + SECOND_KEY.partition(":")[2]), value, PICKLED)


def with_moved_signature(codec: PayloadCodec, value: object) -> bytes:
    return changed(dumped(codec, value, PICKLED), **{**fields_of(dumped(codec, {}, PICKLED)), "body": _body(value)})


def of_another_task(codec: PayloadCodec, value: object) -> bytes:
    return codec.dump_arguments(value, "mail", "other", PICKLED, WHAT)


def of_another_queue(codec: PayloadCodec, value: object) -> bytes:
    return codec.dump_arguments(value, "other", "pay", PICKLED, WHAT)


def of_a_result(codec: PayloadCodec, value: object) -> bytes:
    return codec.dump_result(value, JobRef("mail", "pay"), PICKLED, WHAT)


def with_another_header(codec: PayloadCodec, value: object) -> bytes:
    return changed(dumped(codec, value, PICKLED), zip="zlib")


def declared_as_json(codec: PayloadCodec, value: object) -> bytes:
    return changed(dumped(codec, value, PICKLED), ser="json")


def of_unknown_serializer(codec: PayloadCodec, value: object) -> bytes:
    return changed(dumped(codec, value, PICKLED), ser="pickle")


def _signing_with(key: str) -> PayloadCodec:
    return payloads(**{**PICKLES, "payload_signing_keys": key})


def _body(value: object) -> str:
    return base64.b64encode(dump(value, WHAT)).decode()


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (unsigned, "is pickled but not signed, so it was not loaded"),
        (of_unknown_key, "is signed with key 'other', so it was not loaded: add this key to payload_signing_keys"),
        (of_another_key, "data of job 1 has an invalid signature, so it was not loaded"),
        (with_moved_signature, "data of job 1 has an invalid signature"),
        (of_another_task, "data of job 1 has an invalid signature"),
        (of_another_queue, "data of job 1 has an invalid signature"),
        (of_a_result, "data of job 1 has an invalid signature"),
        (with_another_header, "data of job 1 has an invalid signature"),
        (declared_as_json, "is not valid JSON"),
        (of_unknown_serializer, "is serialized with 'pickle', which this app does not accept"),
    ],
)
def test_an_untrusted_pickle_is_never_loaded(forge: Forge, reason: str, tmp_path: Path) -> None:
    codec, written = payloads(**PICKLES), tmp_path / "written"
    assert codec.load_arguments(job(dumped(codec, WritesFile(written), PICKLED))).value is None
    assert written.exists()  # the payload works if it is accepted
    written.unlink()
    with pytest.raises(DecodeError, match=reason):
        codec.load_arguments(job(forge(codec, WritesFile(written))))
    assert not written.exists()


def test_an_app_that_does_not_accept_pickles_does_not_load_its_own(tmp_path: Path) -> None:
    written = tmp_path / "written"
    data = dumped(payloads(**PICKLES), WritesFile(written), PICKLED)
    for codec in (payloads(), payloads(payload_signing_keys=FIRST_KEY)):
        with pytest.raises(
            DecodeError, match=r"'cloudpickle', which this app does not accept; .* add it to accept_content"
        ):
            codec.load_arguments(job(data))
    assert not written.exists()


def test_the_result_of_another_job_is_not_loaded(tmp_path: Path) -> None:
    codec, written = payloads(**PICKLES), tmp_path / "written"
    stored = codec.dump_result(WritesFile(written), JobRef("mail", "1"), PICKLED, WHAT).decode()
    for ref in (JobRef("mail", "2"), JobRef("other", "1")):
        with pytest.raises(DecodeError, match="copied from another task, queue or job"):
            codec.load_result(ref, stored)
    assert codec.load_error(JobRef("mail", "1"), stored) is None
    assert not written.exists()
    key = "bull:{mail}:1"
    assert codec.load_results({key: json.loads(stored)}) == ({key: None}, True)
    assert written.exists()


def test_result_accept_content_can_be_stricter_than_accept_content() -> None:
    codec = payloads(**PICKLES, result_accept_content="json")
    assert codec.load_arguments(job(dumped(codec, {"x": 1}, PICKLED))).value == {"x": 1}
    with pytest.raises(DecodeError, match="add it to result_accept_content or accept_content"):
        codec.load_result(JobRef("mail", "1"), codec.dump_result(1, JobRef("mail", "1"), PICKLED, WHAT).decode())


def test_arguments_can_be_copied_to_a_job_with_another_id() -> None:
    codec = payloads(**PICKLES)
    assert codec.load_arguments(job(dumped(codec, {"x": 1}, PICKLED), job_id="copy")).value == {"x": 1}


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_signing_keys_are_rotated_without_losing_jobs() -> None:
    old = payloads(**{**PICKLES, "payload_signing_keys": [FIRST_KEY]})
    both = payloads(**{**PICKLES, "payload_signing_keys": [SECOND_KEY, FIRST_KEY]})
    new = payloads(**{**PICKLES, "payload_signing_keys": [SECOND_KEY]})
    before, after = dumped(old, {"x": 1}, PICKLED), dumped(both, {"x": 1}, PICKLED)
    assert (fields_of(before)["key"], fields_of(after)["key"]) == ("k1", "k2")
    assert both.load_arguments(job(before)) == both.load_arguments(job(after)) == new.load_arguments(job(after))
    with pytest.raises(DecodeError, match="'k1'"):
        new.load_arguments(job(before))


def test_encryption_keys_are_rotated_and_belong_to_queues() -> None:
    old = payloads(payload_encryption_keys={"mail": ENCRYPTION_KEY})
    both = payloads(payload_encryption_keys={"mail": f"{OTHER_ENCRYPTION_KEY} {ENCRYPTION_KEY}"})
    before, after = dumped(old, "secret", JSON), dumped(both, "secret", JSON)
    assert b"secret" not in base64.b64decode(fields_of(before)["body"])
    assert (fields_of(before)["enc"], fields_of(after)["enc"]) == ("e1", "e2")
    assert both.load_arguments(job(before)).value == both.load_arguments(job(after)).value == "secret"
    with pytest.raises(DecodeError, match="encrypted with key 'e2': add this key to payload_encryption_keys for queue"):
        old.load_arguments(job(after))
    assert old.dump_arguments("x", "other", "pay", JSON, WHAT) == b'"x"'
    every = payloads(payload_encryption_keys={"*": ENCRYPTION_KEY, "public": []})
    assert every.encrypts("other")
    assert not every.encrypts("public")


@pytest.mark.parametrize("field", ["body", "iv", "ser", "sig", "key"])
def test_a_changed_ciphertext_or_header_is_not_decrypted(field: str) -> None:
    codec = payloads(**PICKLES, payload_encryption_keys={"*": ENCRYPTION_KEY})
    data = dumped(codec, {"x": 1}, PICKLED)
    value = fields_of(data)[field]
    other = {"ser": "json", "key": "k2"}.get(field, ("A" if value[0] != "A" else "B") + value[1:])
    with pytest.raises(DecodeError, match="cannot be decrypted: it was changed, copied from another task"):
        codec.load_arguments(job(changed(data, **{field: other})))


def test_an_encrypted_payload_of_another_task_is_not_decrypted() -> None:
    codec = payloads(payload_encryption_keys={"*": ENCRYPTION_KEY})
    with pytest.raises(DecodeError, match="copied from another task"):
        codec.load_arguments(job(dumped(codec, {"x": 1}, JSON), task="other"))


def test_an_encryption_key_does_not_make_pickles_acceptable(tmp_path: Path) -> None:
    """A Node.js worker has the key of its queue, and must not be able to run code in Python with it."""
    codec, written = payloads(**PICKLES, payload_encryption_keys={"*": ENCRYPTION_KEY}), tmp_path / "written"
    key = SecretKey("e1", base64.urlsafe_b64decode(ENCRYPTION_KEY.partition(":")[2] + "="))
    context = PayloadContext("arguments", "{mail}", "pay")
    pickled = Envelope("cloudpickle", dump(WritesFile(written), WHAT))
    for envelope in (pickled, sign(pickled, context, key), replace(pickled, signature=b"x")):
        with pytest.raises(DecodeError, match="so it was not loaded"):
            codec.load_arguments(job(encrypt(envelope, context, key).to_json()))
    assert not written.exists()


@pytest.mark.parametrize(
    "stored",
    [
        b'{"bulltask:payload":1}',
        b'{"bulltask:payload":{"v":2,"ser":"json","body":""}}',
        b'{"bulltask:payload":{"v":1,"ser":"json","body":7}}',
        b'{"bulltask:payload":{"v":1,"ser":"json","body":"?"}}',
        b'{"bulltask:payload":{"v":1},"more":1}',
        b'{"bulltask:payload":',
    ],
)
def test_a_malformed_envelope_is_an_error(stored: bytes) -> None:
    with pytest.raises(DecodeError, match="data of job 1"):
        payloads().load_arguments(job(stored))


def test_an_envelope_is_described_without_its_content() -> None:
    codec = payloads(**PICKLES, payload_encryption_keys={"*": ENCRYPTION_KEY}, compression_threshold=0)
    data = dumped(codec, "x" * 1_000, PayloadFormat("cloudpickle", "zstd"))
    size = len(base64.b64decode(fields_of(data)["body"]))
    shown = describe(json.loads(data))
    assert shown == f"cloudpickle, zstd, signed (key k1), encrypted (key e1), {size} bytes"
    assert describe({ENVELOPE_KEY: 1}) == "a malformed payload envelope"


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"task_serializer": "cloudpickle"}, "pickles must be signed: set payload_signing_keys"),
        ({"result_serializer": "cloudpickle"}, "pickles must be signed: set payload_signing_keys"),
        ({"accept_content": ["json", "cloudpickle"]}, "set payload_signing_keys to the senders' keys"),
        (
            {"task_serializer": "cloudpickle", "payload_signing_keys": FIRST_KEY},
            r"accept_content does not contain it: set accept_content=\['json', 'cloudpickle'\]",
        ),
        ({**PICKLES, "payload_encryption_keys": {"*": "e1:" + FIRST_KEY[3:]}}, "use different keys, because a program"),
        ({**PICKLES, "result_serializer": "cloudpickle", "result_accept_content": "json"}, "result_accept_content"),
    ],
)
def test_a_combination_that_cannot_work_is_an_error_when_the_app_starts(
    settings: dict[str, object], advice: str
) -> None:
    with pytest.raises(ConfigError, match=advice):
        Settings(settings, {}).freeze()


def test_an_app_does_not_start_if_it_cannot_use_the_serializer_of_a_task() -> None:
    app = App("tested")

    @app.task(name="pickled", serializer="cloudpickle")
    def pickled() -> None: ...

    with pytest.raises(ConfigError, match="the serializer of task pickled is cloudpickle, and pickles must be signed"):
        _ = app._config


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("accept_content", "cloudpickle", "must be a list that contains json"),
        ("task_compression", "bzip2", "must be zlib or zstd, not 'bzip2'"),
        ("payload_signing_keys", "hunter2", "each key in payload_signing_keys must be an id"),
        ("payload_signing_keys", "k1:hunter2", "must be 32 random bytes in base64; make one with: python -c"),
        ("payload_signing_keys", [FIRST_KEY, FIRST_KEY], "two keys with the same id"),
        ("payload_signing_keys", 7, "must be a list of keys"),
        ("payload_encryption_keys", FIRST_KEY, "must be a dictionary of keys by queue, or a JSON object"),
        ("payload_encryption_keys", {"a:b": FIRST_KEY}, "a key of payload_encryption_keys must be the name of a queue"),
        (
            "payload_encryption_keys",
            {"mail": "k1:hunter2"},
            r"key 'k1' in .*\['mail'\] must be 32 random",
        ),
    ],
)
def test_an_invalid_setting_is_an_error_that_shows_no_key(name: str, value: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        Settings({name: value}, {})
    assert "hunter2" not in str(caught.value)
    assert FIRST_KEY not in str(caught.value)


def test_keys_are_never_shown_and_can_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "signing").write_text(f"{SECOND_KEY}\n{FIRST_KEY}\n")
    (tmp_path / "encryption").write_text(json.dumps({"*": ENCRYPTION_KEY}))
    files = {
        "BULLTASK_PAYLOAD_SIGNING_KEYS_FILE": str(tmp_path / "signing"),
        "BULLTASK_PAYLOAD_ENCRYPTION_KEYS_FILE": str(tmp_path / "encryption"),
    }
    settings = Settings({}, files)
    config = settings.freeze()
    assert [key.id for key in config.signing_keys] == ["k2", "k1"]
    assert [key.id for key in config.encryption_keys["*"]] == ["e1"]
    shown = f"{settings!r} {config!r} {settings.payload_signing_keys} {settings.overrides()}"
    assert FIRST_KEY.partition(":")[2] not in shown
    assert repr(config.signing_keys[0].secret) not in shown
