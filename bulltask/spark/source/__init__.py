"""What the data source ``bulltask`` reads: jobs, and the events and counts of queues."""
