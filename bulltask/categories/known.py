"""The table of known exceptions from Python and popular libraries.

An exception's classes are looked up from the most specific to the most general; the first match decides. A key consists
of the top-level package and a type's name, so ``redis.ConnectionError`` matches wherever redis defines it, and the
library is never imported.
"""

from __future__ import annotations

import errno

from bulltask.categories.category import PERMANENT, TRANSIENT, ErrorCategory, Rule, category_table
from bulltask.categories.chain import attribute, chain_of, text_of
from bulltask.categories.database import by_database, by_operation, by_sqlstate
from bulltask.categories.http import by_response, by_status_error, by_url_error

__all__ = ["known_category"]


def known_category(exc: BaseException) -> ErrorCategory | None:
    """Return the category of this exception (not of its causes), ``None`` if it is unknown."""
    # Clients convert a certificate error to a connection error, sometimes without the original as its cause.
    if any("certificate verify failed" in text_of(each).lower() for each in chain_of(exc)):
        return PERMANENT
    for cls in type(exc).__mro__:
        for name in (f"{cls.__module__.partition('.')[0]}.{cls.__name__}", cls.__name__):
            entry = _KNOWN.get(name)
            category = entry(exc) if callable(entry) else entry
            if category is not None:
                return category
    return by_response(exc) or by_sqlstate(exc)


_ERRNO = category_table(
    transient="ECONNREFUSED ECONNRESET ECONNABORTED EPIPE ESHUTDOWN ENOTCONN ETIMEDOUT EHOSTUNREACH EHOSTDOWN "
    "ENETUNREACH ENETDOWN ENETRESET EADDRINUSE EADDRNOTAVAIL EINPROGRESS EALREADY EAGAIN EWOULDBLOCK EINTR EBUSY "
    "EDEADLK EDEADLOCK ENOLCK ESTALE EIO EREMOTEIO ENOSPC EDQUOT EMFILE ENFILE ENOMEM ENOBUFS",
    permanent="EINVAL EBADF ENAMETOOLONG ELOOP EROFS EXDEV ENOEXEC ENOSYS E2BIG EFBIG EAFNOSUPPORT EPROTONOSUPPORT",
)
_REDIS_WORDS = category_table(
    transient="LOADING BUSY OOM READONLY MISCONF CLUSTERDOWN MASTERDOWN TRYAGAIN NOREPLICAS NOGOODSLAVE MOVED ASK",
    permanent="NOAUTH WRONGPASS NOPERM WRONGTYPE CROSSSLOT DENIED",
)


def _by_errno(exc: BaseException) -> ErrorCategory | None:
    number = attribute(exc, "errno")
    return _ERRNO.get(errno.errorcode.get(number, "")) if isinstance(number, int) else None


def _by_redis_reply(exc: BaseException) -> ErrorCategory | None:
    return _REDIS_WORDS.get(text_of(exc).partition(" ")[0])


def _by_smtp(exc: BaseException) -> ErrorCategory | None:
    recipients = attribute(exc, "recipients")
    replies = recipients.values() if isinstance(recipients, dict) else [(attribute(exc, "smtp_code"),)]
    codes = [reply[0] for reply in replies if isinstance(reply[0], int)]
    if any(400 <= code < 500 for code in codes):  # in SMTP, unlike in HTTP, 4yz is a temporary error
        return TRANSIENT
    return PERMANENT if any(500 <= code < 600 for code in codes) else None


def _by_content_type(exc: BaseException) -> ErrorCategory | None:
    return by_status_error(exc) or PERMANENT  # the status is good, but the body cannot be parsed


def _table(*rows: tuple[ErrorCategory | Rule, str, str]) -> dict[str, ErrorCategory | Rule]:
    """Build a mapping from ``package.Type`` (``Type`` for package ``*``) to a category or rule."""
    return {
        name if package == "*" else f"{package}.{name}": category
        for category, packages, names in rows
        for package in packages.split()
        for name in names.split()
    }


_KNOWN = _table(
    (TRANSIENT, "bulltask", "BrokerError SoftTimeLimitExceeded TimeLimitExceeded"),
    (
        PERMANENT,
        "bulltask",
        "BrokerAuthError ScriptIntegrityError JobNotFoundError ParentNotFoundError AppNotFoundError",
    ),
    (PERMANENT, "bulltask", "DuplicateTaskError"),
    (_by_errno, "builtins", "OSError"),
    (TRANSIENT, "builtins", "ConnectionError TimeoutError BlockingIOError InterruptedError MemoryError"),
    (PERMANENT, "builtins", "PermissionError FileNotFoundError IsADirectoryError NotADirectoryError"),
    (PERMANENT, "builtins", "ValueError TypeError LookupError AttributeError AssertionError ArithmeticError"),
    (PERMANENT, "builtins", "NameError NotImplementedError RecursionError ImportError SyntaxError"),
    (TRANSIENT, "socket", "gaierror herror"),
    (TRANSIENT, "ssl", "SSLError"),
    (PERMANENT, "ssl", "SSLCertVerificationError"),
    (TRANSIENT, "asyncio", "CancelledError IncompleteReadError"),
    (TRANSIENT, "concurrent", "CancelledError"),
    (TRANSIENT, "multiprocessing", "TimeoutError"),
    (TRANSIENT, "subprocess", "TimeoutExpired"),
    # HTTP
    (by_status_error, "httpx", "HTTPStatusError"),
    (TRANSIENT, "httpx httpcore", "TimeoutException NetworkError ProxyError RemoteProtocolError"),
    (TRANSIENT, "httpcore", "ConnectionNotAvailable"),
    (PERMANENT, "httpx httpcore", "UnsupportedProtocol LocalProtocolError"),
    (PERMANENT, "httpx", "InvalidURL DecodingError TooManyRedirects CookieConflict StreamError"),
    (by_status_error, "requests", "HTTPError"),
    (TRANSIENT, "requests", "ConnectionError Timeout ChunkedEncodingError RetryError"),
    (PERMANENT, "requests", "InvalidURL MissingSchema InvalidSchema URLRequired InvalidHeader InvalidJSONError"),
    (PERMANENT, "requests", "ContentDecodingError TooManyRedirects StreamConsumedError"),
    (TRANSIENT, "urllib3", "TimeoutError ProtocolError ProxyError EmptyPoolError IncompleteRead SSLError"),
    (PERMANENT, "urllib3", "LocationValueError DecodeError InvalidHeader"),
    (by_status_error, "urllib", "HTTPError"),
    (by_url_error, "urllib", "URLError"),
    (TRANSIENT, "urllib", "ContentTooShortError"),
    (TRANSIENT, "http", "IncompleteRead BadStatusLine"),
    (PERMANENT, "http", "InvalidURL"),
    (by_status_error, "aiohttp", "ClientResponseError"),
    (_by_content_type, "aiohttp", "ContentTypeError"),
    (TRANSIENT, "aiohttp", "ClientConnectionError ClientPayloadError UploadAbortedError"),
    (PERMANENT, "aiohttp", "ClientConnectorCertificateError ServerFingerprintMismatch"),
    (PERMANENT, "aiohttp", "InvalidURL NonHttpUrlClientError TooManyRedirects"),
    # mail, files over the network
    (_by_smtp, "smtplib", "SMTPResponseException SMTPRecipientsRefused"),
    (TRANSIENT, "smtplib", "SMTPServerDisconnected SMTPConnectError"),
    (PERMANENT, "smtplib", "SMTPAuthenticationError SMTPNotSupportedError"),
    (TRANSIENT, "ftplib", "error_temp"),
    (PERMANENT, "ftplib", "error_perm"),
    # Redis and Valkey
    (TRANSIENT, "redis valkey", "ConnectionError TimeoutError BusyLoadingError OutOfMemoryError ReadOnlyError"),
    (TRANSIENT, "redis valkey", "ClusterDownError MasterDownError TryAgainError AskError SlotNotCoveredError"),
    (TRANSIENT, "redis valkey", "WatchError LockError InvalidResponse"),
    (PERMANENT, "redis valkey", "AuthenticationError AuthorizationError AuthenticationWrongNumberOfArgsError"),
    (PERMANENT, "redis valkey", "NoPermissionError DataError ClusterCrossSlotError CrossSlotTransactionError"),
    (_by_redis_reply, "redis valkey", "ResponseError"),
    # databases: DB-API names in any package
    (by_operation, "*", "OperationalError InterfaceError"),
    (by_database, "*", "InternalError DatabaseError"),
    (PERMANENT, "*", "IntegrityError ProgrammingError DataError NotSupportedError"),
    (PERMANENT, "sqlite3", "InterfaceError"),  # SQLite has no network connection: the call was invalid
    (TRANSIENT, "sqlalchemy", "TimeoutError DisconnectionError"),
    (PERMANENT, "sqlalchemy", "ArgumentError CompileError"),
    # invalid input or configuration
    (PERMANENT, "*", "ValidationError ImproperlyConfigured"),
    (PERMANENT, "struct zlib", "error"),
    (PERMANENT, "_csv configparser", "Error"),
    (PERMANENT, "_pickle", "UnpicklingError"),
    (PERMANENT, "_lzma", "LZMAError"),
    (PERMANENT, "gzip", "BadGzipFile"),
    (PERMANENT, "zipfile", "BadZipFile"),
    (PERMANENT, "tarfile", "ReadError"),
    (PERMANENT, "yaml", "YAMLError"),
)
