"""Rows become jobs, and the results of jobs become rows."""
