"""The asyncio classes; ``make sync`` generates ``bulltask.queue.sync`` from them."""
