"""Queues of Bull, BullMQ's predecessor, become queues of BullMQ: ``bulltask migrate-bull`` as functions.

::

    migration = BullMigration(app.queue("emails"))
    plan = migration.plan()       # reads, changes nothing
    report = migration.run()      # again after a crash: goes on where it stopped

docs/how-to/migrating-from-bull.md says what becomes of what.
"""

from __future__ import annotations

from bulltask.migrate.migration import BullMigration
from bulltask.migrate.outcome import Outcome, Plan, Report
from bulltask.migrate.recognise import Layout

__all__ = ["BullMigration", "Layout", "Outcome", "Plan", "Report"]
