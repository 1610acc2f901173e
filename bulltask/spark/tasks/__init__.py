"""Spark inside a worker: tasks with ``spark=True``."""
