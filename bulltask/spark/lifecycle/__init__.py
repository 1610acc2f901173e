"""The lifecycle of jobs, derived from their queues' events: in plain Python, with arrays, and in Spark."""
