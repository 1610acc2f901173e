"""The transactional outbox: jobs are stored in the same transaction as the data, and sent after the commit.

:mod:`bulltask.outbox.sqlalchemy` and :mod:`bulltask.outbox.django` contain the outboxes for these two libraries, and
:mod:`bulltask.outbox.outbox` everything else.
"""
