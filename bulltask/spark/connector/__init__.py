"""The connector ``format("bulltask")``: its session, its data source, and functions that read and write with it."""
