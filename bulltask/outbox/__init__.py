"""The transactional outbox: jobs are stored in the same transaction as the data, and sent after the commit.

:mod:`bulltask.outbox.sqlalchemy` and :mod:`bulltask.outbox.django` contain the outboxes for these two libraries. A row
contains the jobs of one call (:mod:`bulltask.outbox.outbox`). Relays (:mod:`bulltask.outbox.outbox`) read committed
rows, add each of their jobs to Redis once (:mod:`bulltask.outbox.outbox`), and delete the rows.
"""
