"""The app of the project that the guide's examples belong to."""

from __future__ import annotations

import os

if os.environ["LIBRARY"] == "bulltask":  # the line that the migration guide changes
    from bulltask.celery import Celery
else:
    from celery import Celery

app = Celery("proj", broker=os.environ["TEST_BROKER"], backend=os.environ["TEST_BROKER"], include=["proj.tasks"])
