"""The lifecycle of jobs, derived from the events of their queues: in plain Python, with arrays, and in Spark."""
