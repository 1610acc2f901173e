"""The transactional outbox: jobs are written to the database in the data's transaction, and sent after its commit.

:mod:`bulltask.outbox.sqlalchemy` and :mod:`bulltask.outbox.django` contain the outboxes for these two libraries. A row
contains the jobs of one call (:mod:`bulltask.outbox.stored`). Relays (:mod:`bulltask.outbox.relay`) read committed
rows, add each of their jobs to Redis once (:mod:`bulltask.outbox.sending`), and delete the rows.
"""
