"""The connector `format("bulltask")`: its session, what it reads and what it writes."""
