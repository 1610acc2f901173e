"""The settings of payloads: serializers, compression, keys; part of the table in :mod:`bulltask.config.settings`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from bulltask.config.parsers import Parse, integer, optional, parse_names
from bulltask.config.secret_keys import keys_by_queue, signing_keys
from bulltask.config.setting import Setting
from bulltask.errors import ConfigError
from bulltask.extras import check_installed
from bulltask.payloads.compression import check_compression
from bulltask.payloads.envelope import CLOUDPICKLE, JSON, ZLIB, ZSTD

if TYPE_CHECKING:
    from bulltask.config.config import Config

__all__ = [
    "PAYLOAD_SETTINGS",
    "check_payload_options",
    "check_payload_settings",
    "check_serializer",
    "compression",
]

_PICKLES: Final = ("pickle", "application/x-python-serialize", "application/x-pickle")


def serializer(value: Any, name: str) -> str:
    """Return the name of a serializer.

    Raises:
        ConfigError: There is no such serializer; ``name`` identifies the setting or option in the message.
    """
    if value == "application/json":
        return JSON
    if value not in (JSON, CLOUDPICKLE):
        hint = "; cloudpickle supports everything that pickle does, and is signed" if value in _PICKLES else ""
        raise ConfigError(f"{name} must be json or cloudpickle, not {value!r:.200}{hint}")
    return str(value)


def compression(value: Any, name: str) -> str:
    """Return the name of a compression method; Celery's ``gzip`` is ``zlib``.

    Raises:
        ConfigError: There is no such method; ``name`` identifies the setting or option in the message.
    """
    if value not in (ZLIB, ZSTD, "gzip"):
        raise ConfigError(f"{name} must be zlib or zstd, not {value!r:.200}")
    return ZLIB if value == "gzip" else str(value)


def _accepted(value: Any, name: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(serializer(item, f"an item of {name}") for item in parse_names(value, name)))
    if JSON not in names:
        raise ConfigError(
            f"{name} must be a list that contains json, because Node.js and canvases use it, not {value!r:.200}"
        )
    return names


def check_payload_settings(config: Config) -> None:
    """Check that the settings of payloads are consistent, and that the packages they need are installed.

    Raises:
        ConfigError: A combination is impossible; the message says what to do.
        MissingExtraError: An optional dependency is not installed.
    """
    if CLOUDPICKLE in (*config.accept_content, *(config.result_accept_content or ())) and not config.signing_keys:
        raise ConfigError(
            "accept_content contains cloudpickle, so bulltask must be able to verify that a payload comes from a "
            "sender that you trust: set payload_signing_keys to the senders' keys"
        )
    check_serializer(config.task_serializer, config, "task_serializer is cloudpickle")
    if config.result_serializer == CLOUDPICKLE:
        accepted = config.accept_content if config.result_accept_content is None else config.result_accept_content
        _check_cloudpickle(config, accepted, "result_serializer is cloudpickle", "result_accept_content")
    for name in (config.task_compression, config.result_compression):
        check_compression(name)
    if _share_a_key(config):
        raise ConfigError(
            "payload_signing_keys and payload_encryption_keys have a key in common: use different keys, because a "
            "program that can decrypt, such as a Node.js worker, must not be able to sign pickles"
        )
    if any(config.encryption_keys.values()):
        check_installed("cryptography", "encryption", "payload_encryption_keys")


def _share_a_key(config: Config) -> bool:
    """Whether a key both signs and encrypts. The keys are local variables here, where no error is raised."""
    encrypting = {key.secret for keys in config.encryption_keys.values() for key in keys}
    return not encrypting.isdisjoint(key.secret for key in config.signing_keys)


def check_serializer(name: str | None, config: Config, where: str) -> None:
    """Check that an app can write and read a serializer's payloads.

    Args:
        name: The serializer; ``None`` if none is set.
        config: The app's settings.
        where: What sets the serializer, for the message.

    Raises:
        ConfigError: It is cloudpickle, and the app has no key, or does not accept it.
    """
    if name == CLOUDPICKLE:
        _check_cloudpickle(config, config.accept_content, where, "accept_content")


def check_payload_options(given_serializer: str | None, given_compression: str | None) -> None:
    """Check the options ``serializer`` and ``compression`` of a task or a call.

    Raises:
        ConfigError: There is no such serializer or compression method.
        MissingExtraError: The compression method is not installed.
    """
    if given_serializer not in (None, JSON, CLOUDPICKLE):
        serializer(given_serializer, "serializer")
    if given_compression is not None:
        check_compression(compression(given_compression, "compression"))


def _check_cloudpickle(config: Config, accepted: tuple[str, ...], where: str, setting: str) -> None:
    if not config.signing_keys:
        raise ConfigError(f"{where}, and pickles must be signed: set payload_signing_keys to a list of keys")
    if CLOUDPICKLE not in accepted:
        raise ConfigError(f"{where}, but {setting} does not contain it: set {setting}=['json', 'cloudpickle']")


def _row(name: str, parse: Callable[[Any, str], Any], default: object, doc: str, field: str = "") -> Setting:
    parser: Parse = parse
    return Setting(name, field or name, parser, default, doc)


PAYLOAD_SETTINGS: Final = (
    _row(
        "task_serializer",
        serializer,
        JSON,
        "Serializer of arguments, for tasks and calls without `serializer`. Use cloudpickle for Python "
        "objects that JSON cannot express.",
    ),
    _row(
        "result_serializer", serializer, JSON, "Serializer of results and exceptions, for tasks without `serializer`."
    ),
    _row(
        "accept_content",
        _accepted,
        (JSON,),
        "Serializers of the arguments that a worker loads. Add cloudpickle to run jobs with pickled "
        "arguments; it needs payload_signing_keys.",
    ),
    _row(
        "result_accept_content",
        optional(_accepted),
        None,
        "Serializers of the results and exceptions that get() and the next step of a canvas load; none: "
        "those in accept_content.",
    ),
    _row(
        "task_compression",
        optional(compression),
        None,
        "Compression of arguments; zstd needs bulltask[zstd]. Set it if arguments are large.",
    ),
    _row(
        "result_compression",
        optional(compression),
        None,
        "Compression of results; zstd needs bulltask[zstd]. Set it if results are large.",
    ),
    _row(
        "compression_threshold",
        integer(0),
        4_096,
        "Minimum size of a payload that is compressed, in bytes.",
    ),
    _row(
        "max_decompressed",
        integer(1),
        100_000_000,
        "Maximum size of a compressed payload after decompression, in bytes. It protects workers from "
        "small payloads that decompress to huge ones.",
    ),
    _row(
        "max_decompressed_tokens",
        integer(1),
        5_000_000,
        "Maximum number of JSON tokens (brackets, strings, commas) in a compressed payload after decompression. Each "
        "may take 80 bytes of a worker's memory.",
    ),
    _row(
        "payload_signing_keys",
        signing_keys,
        None,
        "Keys that sign pickles. The first key signs, and all keys verify, so you can replace a key.",
        "signing_keys",
    ),
    _row(
        "payload_encryption_keys",
        keys_by_queue,
        None,
        "Keys that encrypt arguments and results, by queue; '*': all other queues. The first key of a "
        "queue encrypts, and all of them decrypt.",
        "encryption_keys",
    ),
)
