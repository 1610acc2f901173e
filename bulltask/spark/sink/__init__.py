"""From rows to jobs, and from jobs back to rows."""
