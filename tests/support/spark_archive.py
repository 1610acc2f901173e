"""Create the archive of Spark's classes for the tests: ``python -m tests.support.spark_archive``.

Java dumps the loaded classes to the archive (class data sharing). A JVM that starts with it does not unpack, read and
verify some 10,000 classes, which saves a quarter of the CPU time of a small run. Creating it costs as much time as six
JVMs save; ``make test`` does so once for each version of Spark and Java. The tests also run without it.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from pathlib import Path

from bulltask.spark import session
from tests.spark.conftest import settings
from tests.support.spark_jvm import ARCHIVED, QUICK, archive, java, shared_home

EXIT_S = 900


def main() -> None:
    """Create the archive unless it exists; one process at a time."""
    os.environ["SPARK_HOME"] = str(shared_home())
    directory = archive().parent
    with (directory / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=directory) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive().exists():
            new = Path(scratch, "new.jsa")
            run(Path(scratch), f"{QUICK} -XX:ArchiveClassesAtExit={new} {ARCHIVED}")
            # A truncated archive, for example if the disk was full, would crash each JVM with SIGBUS.
            subprocess.run([java(), f"-XX:SharedArchiveFile={new}", *ARCHIVED.split(), "-version"], check=True)
            new.rename(archive())


def run(directory: Path, options: str) -> None:
    """Run a query in a JVM with these options, and wait until the JVM exits."""
    spark = session("classes", "local[2]", conf={**settings(directory), "spark.driver.extraJavaOptions": options})
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    spark.range(10).selectExpr("id", "id % 3 AS part").write.parquet(str(directory / "rows"))
    assert len(spark.read.parquet(str(directory / "rows")).groupBy("part").count().collect()) == 3
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()  # the JVM exits at the end of its input
    gateway.proc.wait(EXIT_S)


if __name__ == "__main__":
    main()
