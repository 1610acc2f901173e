"""Events of workers and jobs: ``@app.on(JobFailed)``."""

from __future__ import annotations

from bulltask.observe import bus, events
from bulltask.observe.bus import *
from bulltask.observe.events import *

__all__ = bus.__all__ + events.__all__
