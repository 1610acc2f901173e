"""Database errors, by the drivers' error codes, because DB-API's exception types are too coarse."""

from __future__ import annotations

import re

from bulltask.categories.category import PERMANENT, TRANSIENT, ErrorCategory, category_table
from bulltask.categories.chain import attribute, chain_of, first_argument, text_of

__all__ = ["by_database", "by_operation", "by_sqlstate"]

# Transient: lost or refused connections, too many connections, shutdown, read-only after a failover, locks, deadlocks,
# timeouts, no space left. Permanent: accounts, unknown names, constraints, missing values.
_MYSQL = category_table(
    transient="1015 1021 1037 1040 1041 1053 1114 1203 1205 1213 1226 1290 1317 1836 2002 2003 2006 2013 2055 3024 "
    "3572",
    permanent="1044 1045 1049 1054 1142 1143 1227 1364 3819 4025",
)
_SQLITE = category_table(
    permanent="ERROR READONLY PERM AUTH MISMATCH MISUSE RANGE TOOBIG CONSTRAINT NOTADB CORRUPT FORMAT"
)
_SQLSTATE_PERMANENT = ("0A", "21", "22", "23", "28", "2B", "34", "3D", "3F", "40002", "42", "44")
# Classes: connection, rollback (deadlock, serialization), resources, operator, system. Codes: lock not available,
# object in use, read-only (a failover), ODBC's timeouts.
_SQLSTATE_TRANSIENT = ("08", "40", "53", "57", "58", "55P03", "55006", "25006", "HYT")
# Errors of failed PostgreSQL connections have only a message, and SQLite's errors may have lost their code.
_PERMANENT_TEXT = re.compile(
    r"no such (table|column|function|module)|syntax error|has no column|readonly database|not a database|"
    r"authentication failed|no pg_hba\.conf entry|(role|database|user) \S+ does not exist",
    re.IGNORECASE,
)


def by_sqlstate(exc: BaseException) -> ErrorCategory | None:
    """Return the category for the SQLSTATE that psycopg, psycopg2, asyncpg and others attach."""
    state = attribute(exc, "sqlstate") or attribute(exc, "pgcode")
    if not isinstance(state, str) or len(state) != 5:
        return None
    if state.startswith(_SQLSTATE_PERMANENT):  # checked first, as 40002 is an exception to 40
        return PERMANENT
    return TRANSIENT if state.startswith(_SQLSTATE_TRANSIENT) else None


def by_database(exc: BaseException) -> ErrorCategory | None:
    """Return a generic database error's category, by code or else by message; ``None`` if neither is known."""
    # SQLAlchemy and Django wrap the driver's error, which contains the code, in an error with the same name.
    chain = list(chain_of(exc))
    category = next((found for each in chain if (found := _by_driver(each)) is not None), None)
    # Messages of SQLAlchemy's errors are skipped, because they contain the statement and its parameters.
    texts = (text_of(each) for each in chain if attribute(each, "orig") is None)
    return category or (PERMANENT if any(map(_PERMANENT_TEXT.search, texts)) else None)


def by_operation(exc: BaseException) -> ErrorCategory:
    """Return the category of an ``OperationalError`` or ``InterfaceError``: transient unless known to be permanent."""
    return by_database(exc) or TRANSIENT


def _by_driver(exc: BaseException) -> ErrorCategory | None:
    number = first_argument(exc)  # MySQL's drivers
    if isinstance(number, int) and str(number) in _MYSQL:
        return _MYSQL[str(number)]
    library, _, code = str(attribute(exc, "sqlite_errorname")).partition("_")  # SQLITE_BUSY_SNAPSHOT
    return _SQLITE.get(code.partition("_")[0], TRANSIENT) if library == "SQLITE" else by_sqlstate(exc)
