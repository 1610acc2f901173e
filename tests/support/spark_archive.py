"""Make the archive of Spark's classes for the tests: ``python -m tests.support.spark_archive``.

Java writes there what it has loaded, as it lies in memory (class data sharing). A JVM that begins with it need not
unpack, read and verify some 10,000 classes, which saves it a quarter of the CPU time of a small run. To make it takes
as much as six JVMs save; ``make test`` does, once for each version of Spark and Java. The tests do without it, too.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from pathlib import Path

from bulltask.spark import session
from tests.spark.conftest import settings
from tests.support.spark_jvm import ARCHIVED, QUICK, archive, home_of_tests, java

EXIT_S = 900


def main() -> None:
    """Make it, unless it is there; one process at a time."""
    os.environ["SPARK_HOME"] = str(home_of_tests())
    place = archive().parent
    with (place / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=place) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive().exists():
            made = Path(scratch, "made.jsa")
            run(Path(scratch), f"{QUICK} -XX:ArchiveClassesAtExit={made} {ARCHIVED}")
            # One that was cut off, as by a full disk, would end each JVM with SIGBUS.
            subprocess.run([java(), f"-XX:SharedArchiveFile={made}", *ARCHIVED.split(), "-version"], check=True)
            made.rename(archive())


def run(place: Path, options: str) -> None:
    """Run a query in a JVM with these options, and wait for its end."""
    spark = session("classes", "local[2]", conf={**settings(place), "spark.driver.extraJavaOptions": options})
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    spark.range(10).selectExpr("id", "id % 3 AS part").write.parquet(str(place / "rows"))
    assert len(spark.read.parquet(str(place / "rows")).groupBy("part").count().collect()) == 3
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()  # at the end of its input the JVM ends
    gateway.proc.wait(EXIT_S)


if __name__ == "__main__":
    main()
