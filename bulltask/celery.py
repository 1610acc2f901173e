"""bulltask under the name ``celery``: see :mod:`bulltask.contrib.celery.replacement`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bulltask.contrib.celery.replacement import replace_celery

if TYPE_CHECKING:
    from bulltask import *

replace_celery(sys.modules[__name__])
