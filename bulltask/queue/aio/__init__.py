"""The asyncio classes, written by hand. ``make sync`` generates ``bulltask.queue.sync`` from them."""
