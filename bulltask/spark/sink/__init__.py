"""Send rows as jobs, and read the results of jobs as rows."""
