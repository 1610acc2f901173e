"""Convert Bull queues to BullMQ, Bull's successor: ``bulltask migrate-bull`` as a library.

::

    migration = BullMigration(app.queue("emails"))
    plan = migration.plan()       # a dry run
    report = migration.run()      # after a crash, run it again: it continues

docs/how-to/migrating-from-bull.md describes how keys, fields and options are converted.
"""

from __future__ import annotations

from bulltask.migrate.inspection import MigrationOutcome, MigrationPlan, MigrationReport, QueueLayout
from bulltask.migrate.migration import BullMigration

__all__ = ["BullMigration", "MigrationOutcome", "MigrationPlan", "MigrationReport", "QueueLayout"]
