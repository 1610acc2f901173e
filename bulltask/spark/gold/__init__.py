"""The gold tables: aggregates by minute and by day."""
