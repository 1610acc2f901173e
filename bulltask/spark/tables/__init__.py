"""The lake's tables, bronze and silver, as Spark writes them."""
