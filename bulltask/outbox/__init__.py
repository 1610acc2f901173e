"""The transactional outbox: jobs are written to the database in the data's transaction, and sent after its commit.

:mod:`bulltask.outbox.sqlalchemy` and :mod:`bulltask.outbox.django` are the outboxes of the two libraries. A row
contains the jobs of one call (:mod:`bulltask.outbox.stored`). Relays (:mod:`bulltask.outbox.relay`) read committed
rows, add their jobs to Redis, each once (:mod:`bulltask.outbox.sending`), and delete the rows.
"""
