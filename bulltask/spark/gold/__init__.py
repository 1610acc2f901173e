"""The gold tables: what happened, summed up by minute and by day."""
