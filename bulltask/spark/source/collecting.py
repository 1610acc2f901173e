"""Much is made of many replies without Python's search for cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_search_for_cycles"]


@contextmanager
def no_search_for_cycles() -> Iterator[None]:
    """Keep Python from looking for unused objects that refer to each other.

    A page of replies is tens of thousands of lists, and no cycle. Python takes so many new objects for a reason to look
    through all it has, again and again: that is two thirds of the time in which a page of events is read. What is used
    no more goes all the same, by its count. Of several threads the first one ends it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
