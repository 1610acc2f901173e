"""What became of each job, told from its queue's events: once in plain Python, once as Spark runs it."""
