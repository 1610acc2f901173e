"""The readers of the data source ``bulltask``: jobs, events, and counts of jobs."""
