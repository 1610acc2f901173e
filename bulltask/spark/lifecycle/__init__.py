"""The lifecycle of jobs, derived from their queues' events: in plain Python, with NumPy arrays, and in Spark."""
