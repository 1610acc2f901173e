"""The lake's bronze and silver tables, as Spark writes them."""
