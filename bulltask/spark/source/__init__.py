"""What the data source ``bulltask`` reads: jobs, events, and counts of jobs."""
