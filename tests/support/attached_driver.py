"""A Spark driver in a process that can be killed, with another process's JVM: it starts in one second, not in ten.

`attach` turns the driver's process into a client of that JVM, as PySpark's own ``PYSPARK_GATEWAY_PORT`` does.
"""

from __future__ import annotations

from typing import Any

from py4j.java_gateway import JavaObject
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from bulltask.testing.worker import wait_until

__all__ = ["attach", "gateway_variables", "release"]


def gateway_variables(spark: SparkSession) -> dict[str, str]:
    """Return the environment variables that another process needs to find a session's JVM."""
    parameters = _gateway(spark).gateway_parameters
    return {"PYSPARK_GATEWAY_PORT": str(parameters.port), "PYSPARK_GATEWAY_SECRET": parameters.auth_token}


def attach() -> None:
    """Use the Spark context of the JVM that the variables of `gateway_variables` name; `session` then finds it."""
    client = launch_gateway()
    running = client.jvm.org.apache.spark.SparkContext.getOrCreate()
    context = client.jvm.JavaSparkContext.fromSparkContext(running)
    SparkContext(gateway=client, jsc=context, conf=SparkConf(_jconf=context.getConf()))


def release(spark: SparkSession) -> None:
    """Return the JVM to this process after a driver has died: its queries fail, and callbacks come to this process."""
    queries = spark._jsparkSession.sharedState().activeStreamingQueries()
    wait_until(queries.isEmpty, 60.0, "the end of the dead driver's queries")
    client = _gateway(spark)
    if client.__dict__.get("_callback_server") is not None:
        server = JavaObject("GATEWAY_SERVER", client._gateway_client)
        server.resetCallbackClient(server.getCallbackClient().getAddress(), client._python_proxy_port)


def _gateway(spark: SparkSession) -> Any:
    return spark.sparkContext._gateway
