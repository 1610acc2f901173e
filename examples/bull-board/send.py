"""Send jobs that end in different states."""

from __future__ import annotations

from tasks import app, send

from bulltask import PermanentError
from bulltask.queue import FlowJob

done = send.delay("ada@example.com")
failed = send.delay("nobody")
later = send.apply_async(("grace@example.com",), countdown=3600)
pages = [FlowJob("page.count", "pages", {"page": text}) for text in ("one", "two", "three")]
tree = app.flows().add(FlowJob("pages.total", "reports", children=pages))

print("completed:", done.get(timeout=30))
try:
    failed.get(timeout=30)
except PermanentError as error:
    print("failed:", error)
print("delayed:", later.state)
print("a flow:", tree.job.wait_until_finished(timeout=30))
