"""The comparison's sums through PySpark: rows of the same parts read over JDBC, as range and hash, summed by Spark.

For tables whose sums should not be made by the two servers, or by more machines than they are. The definition is
`canonical`, so the result is that of `postgres`; the servers find which rows differ, in the few ranges that do.

In: where the sessions of an end are connected to, and the snapshot that they see. Out: summaries. The snapshots belong
to sessions of this process and must outlive the job.

Source: Spark manual, "JDBC To Other Databases" (predicates, sessionInitStatement, fetchsize).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from psycopg import sql

from parapply.copy.parts import bounds, parts_of
from parapply.errors import ConfigError, ParapplyError
from parapply.extras import install_hint
from parapply.verify import canonical
from parapply.verify.differences import Summary, add

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parapply.copy.leaves import Leaf
    from parapply.copy.parts import Part
    from parapply.copy.published import PublishedTable
    from parapply.verify.differences import Key
    from parapply.verify.postgres import Compared, Session, VerifyEnd

#: Where distributions put PostgreSQL's JDBC driver.
JARS = (Path("/usr/share/java/postgresql.jar"), Path("/usr/share/java/postgresql-jdbc.jar"))
#: Rows fetched at once; above 0 the driver reads in one transaction, which the snapshot needs.
_FETCH_ROWS = 10_000


class _Spark(Protocol):
    """What is used of a SparkSession; PySpark has types for itself only."""

    @property
    def read(self) -> Any:  # noqa: ANN401  PySpark's
        """Return what reads."""
        ...

    def stop(self) -> None:
        """End the session."""


def start(master: str | None, jar: str | None) -> _Spark:
    """Return a Spark session with PostgreSQL's driver, to be stopped by the caller.

    Args:
        master: of a cluster; None for this machine.
        jar: of the JDBC driver; None for the one that a distribution has installed.

    Raises:
        ConfigError: PySpark or the driver is not there.
    """
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415  heavy, and an extra
    except ImportError as error:
        raise ConfigError(
            "--engine spark: PySpark is not installed", hint=f"{install_hint('report')}; it needs Java 17"
        ) from error
    found = Path(jar) if jar else next((path for path in JARS if path.exists()), None)
    if found is None or not found.exists():
        raise ConfigError(
            f"--engine spark: PostgreSQL's JDBC driver is not there{f' ({jar})' if jar else ''}",
            hint="apt install libpostgresql-jdbc-java, or name the file with --jdbc-jar",
        )
    builder = SparkSession.builder.appName("parapply verify").config("spark.jars", str(found))
    builder = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
    if not master:
        # A sum for each range, of this machine's cores: two hundred tasks would be more work than that.
        builder = builder.config("spark.sql.shuffle.partitions", "4")
    session: _Spark = builder.master(master or "local[*]").getOrCreate()
    return session


class SparkEnd:
    """One end, read by Spark; shown to the command as `VerifyEnd` is."""

    def __init__(self, spark: _Spark, end: VerifyEnd, session: Session, snapshot_name: str, *, is_source: bool) -> None:
        """Keep them.

        Args:
            spark: session.
            end: of the same snapshot, for what needs few rows.
            session: one of its sessions, to connect as it is connected.
            snapshot_name: exported, and valid as long as this is used.
            is_source: whose rows the publication's row filter restricts.
        """
        self._spark = spark
        self._end = end
        self._snapshot_name = snapshot_name
        self._is_source = is_source
        info = session.info
        if not info.host or info.host.startswith("/"):
            raise ConfigError("--engine spark: Java connects over TCP only", hint="name a host in the DSN")
        self._url = f"jdbc:postgresql://{info.host}:{info.port}/{info.dbname}"
        self._secrets = {"user": info.user, **({"password": info.password} if info.password else {})}
        self._sslmode = info.get_parameters().get("sslmode")

    def parts(self, table: Compared) -> list[Part]:
        """Return the parts of a table here."""
        return self._end.parts(table)

    async def rows(self, table: Compared, numbers: Sequence[int]) -> list[tuple[Key, int]]:
        """Return key and hash of every row in some ranges; few, so the server is asked."""
        return await self._end.rows(table, numbers)

    async def done(self, table: Compared) -> None:
        """Take notice that a table is compared."""
        await self._end.done(table)

    async def summary(
        self, table: Compared, on_part: Callable[[Part, int], None], numbers: Sequence[int] = ()
    ) -> Summary:
        """Return rows and sums of all ranges; `on_part` is called when all of a relation's parts are read.

        Of some ranges the server is asked.

        Raises:
            ParapplyError: the job failed; Spark's log says more.
        """
        if numbers:
            return await self._end.summary(table, on_part, numbers)
        total: Summary = {}
        leaves = table.published.leaves if self._is_source else table.target_leaves
        for leaf in leaves:
            try:
                found = await asyncio.to_thread(self._sum, table, leaf)
            except Exception as error:
                words = str(error).strip().splitlines() or [type(error).__name__]
                raise ParapplyError(f"Spark, reading {table.published.text}: {words[0]}") from error
            add(total, found)
            for number, part in enumerate(parts_of(leaf, canonical.READ_PAGES)):
                on_part(part, 0 if number else sum(rows for _, rows, _ in found))
        return total

    def _sum(self, table: Compared, leaf: Leaf) -> list[tuple[int, int, int]]:
        from pyspark.sql import functions  # noqa: PLC0415  as above

        published = table.published
        relation = _relation(published, leaf, table.ranges, published.row_filter if self._is_source else "")
        predicates = [bounds(part, "at").as_string(None) or "true" for part in parts_of(leaf, canonical.READ_PAGES)]
        properties = {
            **self._secrets,
            "driver": "org.postgresql.Driver",
            "fetchsize": str(_FETCH_ROWS),
            "sessionInitStatement": self._first_statements(),
            "ApplicationName": "parapply verify spark",
            **({"sslmode": self._sslmode} if self._sslmode else {}),
        }
        frame = self._spark.read.jdbc(self._url, relation, predicates=predicates, properties=properties)
        hashes = functions.sum(frame["row_hash"].cast("decimal(38,0)"))
        summed = frame.groupBy("key_range").agg(functions.count("row_hash"), hashes).collect()
        return [(int(number), int(rows), int(total)) for number, rows, total in summed]

    def _first_statements(self) -> str:
        snapshot = sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(self._snapshot_name)).as_string(None)
        first = ["SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY", snapshot, "SET row_security = off"]
        return "; ".join([*first, canonical.SESSION_SETTINGS])


def _relation(table: PublishedTable, leaf: Leaf, ranges: canonical.Ranges, row_filter: str) -> str:
    """Return what Spark reads: range and hash of each row, and where it is, for the predicates."""
    where = sql.SQL(" WHERE ({})").format(sql.SQL(row_filter)) if row_filter else sql.SQL("")
    query = sql.SQL("(SELECT {} AS key_range, {} AS row_hash, ctid AS at FROM ONLY {}{}) AS hashed").format(
        canonical.key_range(table, ranges), canonical.row_hash(table), sql.Identifier(leaf.schema, leaf.name), where
    )
    return query.as_string(None)
