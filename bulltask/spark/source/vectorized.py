"""Functions of whole columns that run in Spark's tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import DataType

__all__ = ["vectorized"]


def vectorized(
    function: Callable[[Iterator[Any]], Iterator[pa.Array]], returns: DataType
) -> Callable[[Column], Column]:
    """Make a function of a column: it is called once in each task, with an iterator of the column's Arrow arrays.

    ``mapInArrow`` would do the same for whole rows, but needs pandas. Spark takes the function for one whose result
    is not the same each time, so it neither leaves a call out nor makes it twice.

    Args:
        function: returns for each array one of the same length.
        returns: the type of its elements.
    """

    def whole(arrays: Iterator[pa.Array]) -> Iterator[pa.Array]:
        # By these types Spark knows how to call it.
        return function(arrays)

    make: Any = arrow_udf  # its stub knows neither structs nor that the result is a whole UserDefinedFunction
    return cast("Callable[[Column], Column]", make(whole, returns).asNondeterministic())
