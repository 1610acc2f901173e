"""Send jobs to worker.js. The task is defined in Node.js, so it is called by name."""

from __future__ import annotations

from bulltask import App, TaskError

app = App("gallery", broker_url="redis://127.0.0.1:6379/0", task_default_queue="thumbnails")

job = app.send_task("thumbnail", kwargs={"image": "cat.jpg", "width": 200})
print(f"sent job {job.id}")
print("result from Node.js:", job.get(timeout=30))

bad = app.send_task("thumbnail", kwargs={"image": "cat.jpg", "width": 0}, max_retries=0)
try:
    bad.get(timeout=30)
except TaskError as error:
    print("error from Node.js:", str(error).splitlines()[0])
