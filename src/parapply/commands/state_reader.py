"""A slot as `parapply status` and `parapply top` show it: read from both ends, or from the one that answers.

In: the configuration. Out: plain data. Reads the state tables on the target, so it works from any machine, when no
daemon runs, when the publisher is not reachable, and for a role that may only read the state schema. Writes nothing.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

import msgspec

from parapply import blocked
from parapply.commands.status_schema import SourceDocument
from parapply.conflict import listing
from parapply.errors import ParapplyError, TargetRefused
from parapply.model import format_lsn, lsn_text, parse_lsn
from parapply.source import slot
from parapply.target.session import lease, settings
from parapply.target.state import slots as state
from parapply.target.state.display import LATE_S
from parapply.target.state.moves import read_moves, records
from parapply.vocabulary import DaemonState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from parapply.config import Config

#: Seconds to wait for the publisher, because a person waits for the screen.
_SOURCE_TIMEOUT_S = 3

_PROGRESS = """
SELECT p.slot_name, p.lowest_remote_lsn, p.highest_remote_lsn, p.list_remote_lsn::text[] AS list_remote_lsn, p.in_doubt,
       p.confirmed_flush_lsn, p.lag_bytes, p.lag_s, p.commit_order, p.workers AS worker_count, p.state, p.reason,
       p.two_phase, p.reading, p.updated_at::text AS updated_at,
       GREATEST(EXTRACT(epoch FROM pg_catalog.clock_timestamp() - p.updated_at), 0)::float8 AS silent_s,
       p.shown_every_s,
       s.slot_id, s.system_identifier, s.timeline, s.database_name, s.publications, s.host, s.pid, s.version,
       s.limits, s.started_at::text AS started_at, s.last_commit_time::text AS last_commit_time
  FROM {s}.progress AS p JOIN {s}.slots AS s USING (slot_name) WHERE p.slot_name = $1"""

_WORKERS = """
SELECT worker, pid, state, batch_seq, end_lsn, waits_for, since::text AS since, transactions, changes,
       GREATEST(EXTRACT(epoch FROM pg_catalog.clock_timestamp() - since), 0)::float8 AS since_s
  FROM {s}.workers WHERE slot_id = $1::int ORDER BY worker"""

_TABLES = """
SELECT schema_name, table_name, lane, is_table_exclusive, reason, key_columns, retries, transactions, inserts, updates,
       deletes, truncates, waits, wait_s, waits_mostly_for, EXTRACT(epoch FROM counted_at)::float8 AS counted_s
  FROM {s}.tables WHERE slot_id = $1::int ORDER BY schema_name, table_name"""

_COPIES = """
SELECT schema_name, table_name, state, start_lsn::text AS start_lsn, rows, size_bytes, finished_at::text AS finished_at,
       reason
  FROM {s}.copies WHERE slot_id = $1::int ORDER BY schema_name, table_name"""

_PREPARED = """
SELECT gid, source_xid, end_lsn::text AS end_lsn, owner, prepared_at::text AS prepared_at,
       EXTRACT(epoch FROM age)::float8 AS age_s
  FROM {s}.prepared WHERE slot_name = $1 ORDER BY prepared_at, gid"""

#: The publisher's pending commands, and its last ones.
_COMMANDS = """
SELECT number, commit_lsn::text AS commit_lsn, tag, source_role, outcome, reason, recorded_at::text AS recorded_at
  FROM {s}.ddl WHERE slot_id = $1 ORDER BY outcome = 'pending' DESC, ddl.commit_lsn DESC, number DESC LIMIT 5"""

#: A slot that a migration has not made yet.
_NO_SLOT: Final[dict[str, Any]] = {
    **dict.fromkeys(
        ("lowest_remote_lsn", "highest_remote_lsn", "confirmed_flush_lsn", "lag_bytes", "lag_s", "commit_order",
         "state", "two_phase", "updated_at", "system_identifier", "timeline", "database_name", "host", "pid", "version",
         "limits", "started_at", "last_commit_time")
    ),
    **{name: [] for name in
       ("list_remote_lsn", "publications", "workers", "tables", "copies", "ddl", "prepared", "conflicts", "blocked")},
    "in_doubt": 0, "worker_count": 0, "reason": "", "reading": "", "silent_s": 0.0, "shown_every_s": 0.0,
    "is_daemon_connected": False,
}  # fmt: skip


class StateReader:
    """Keeps its connections open between two looks; as a context manager it closes them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._name = f"parapply status {config.source.slot}"
        self._target: settings.Connection | None = None
        self._source: slot.Connection | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        async with AsyncExitStack() as stack:
            for conn in (self._target, self._source):
                if conn is not None:
                    stack.push_async_callback(conn.close)
            self._target = self._source = None

    async def read(self) -> dict[str, Any]:
        """Look at both ends; connects again if the last look has failed.

        Returns:
            A JSON document, as `status_schema.StatusDocument` describes it.

        Raises:
            TargetRefused: the target knows nothing of the slot.
        """
        try:
            report = await self._read_target()
        except ParapplyError:
            await self._close()
            raise
        report["source"] = source = await self._read_source()
        if source["is_reachable"]:
            report["lag_bytes"] = source["lag_bytes"] = _lag_bytes(report)
        report["lag_s"] = lag_s(report)
        return report

    async def _read_target(self) -> dict[str, Any]:
        config = self._config
        name, schema = config.source.slot, config.target.state_schema
        if self._target is None:
            self._target = await settings.connect_reader(config.target.login, self._name)
            await state.has_schema(self._target, schema, only_reads=True)  # refuses another version
        conn = self._target
        with settings.target_errors("reading the status"):
            found = await records(conn, state.in_schema(_PROGRESS, schema), [name])
            moves = await read_moves(conn, schema, name, found[0]["slot_id"] if found else None)
            if not found:
                if not moves.migration:
                    raise TargetRefused(f"the target knows nothing of slot {name!r}", hint="run `parapply init`")
                return {"slot_name": name, **_NO_SLOT, "migration": moves.migration, "cutover": None}
            report = found[0]
            report["migration"], report["cutover"] = moves.migration, moves.cutover
            slot_id = report.pop("slot_id")
            report["workers"] = await records(conn, state.in_schema(_WORKERS, schema), [slot_id])
            report["tables"] = await records(conn, state.in_schema(_TABLES, schema), [slot_id])
            report["copies"] = await records(conn, state.in_schema(_COPIES, schema), [slot_id])
            report["ddl"] = await records(conn, state.in_schema(_COMMANDS, schema), [slot_id])
            report["prepared"] = await records(conn, state.in_schema(_PREPARED, schema), [name])
            workers = [one["pid"] for one in report["workers"]]
            report["blocked"] = _documents(await blocked.look(conn, slot_name=name, but=workers))
        report["conflicts"] = await listing.count(conn, schema, slot_id)
        present = await lease.holders(conn, slot_id)
        report["is_daemon_connected"] = any(holder.is_leader for holder in present)
        if not report["is_daemon_connected"]:
            # Rows of a daemon that was killed: none of these workers exists.
            report["workers"] = []
        if not is_present(report):
            report["limits"] = None
        return report

    async def _read_source(self) -> dict[str, Any]:
        login = self._config.source.login
        if not login.dsn:
            return _unreachable("source.dsn is not set")
        try:
            if self._source is None:
                self._source = await slot.connect(
                    login, application_name=self._name, connect_timeout_s=_SOURCE_TIMEOUT_S
                )
            name = self._config.source.slot
            facts = await slot.inspect(self._source, name)
            with slot.source_errors("asking who blocks a session"):
                waiting = await blocked.look(self._source, slot_name=name)
        except ParapplyError as error:
            if self._source is not None:
                await self._source.close()
                self._source = None
            # Not raised, because a status is also asked for when the publisher is down.
            return _unreachable(error.line())
        limit_bytes = self._config.source.retained_wal_limit_bytes or None
        return {**_of_source(facts), "slot_retained_wal_limit_bytes": limit_bytes, "blocked": _documents(waiting)}


def is_silent(report: dict[str, Any]) -> bool:
    """Return whether the daemon's last report is too old to be current."""
    return bool(report["silent_s"] > report["shown_every_s"] + LATE_S)


def is_present(report: dict[str, Any]) -> bool:
    """Return whether a daemon runs and its last report is current."""
    return report["is_daemon_connected"] and not is_silent(report)


def is_between_tries(report: dict[str, Any]) -> bool:
    """Return whether no session is open and the row says that the daemon comes back; a killed one looks the same."""
    is_waiting = report["state"] in {DaemonState.RECONNECTING, DaemonState.RETRYING}
    return is_waiting and not report["is_daemon_connected"]


def lag_s(report: dict[str, Any]) -> float | None:
    """Return the lag in seconds as of now: while no daemon writes it the most that it can be, None if not known."""
    if is_present(report):
        return None if report["lag_s"] is None else float(report["lag_s"])
    if report["source"].get("lag_bytes") == 0:
        return 0.0
    return None if report["lag_s"] is None else float(report["lag_s"] + report["silent_s"])


def stranger(report: dict[str, Any]) -> str:
    """Return why the publisher that answers is not the one that is applied; empty if it is, or does not answer."""
    source = report["source"]
    if not source["is_reachable"] or report["state"] is None:
        return ""
    if source["system_identifier"] != report["system_identifier"]:
        return "ANOTHER cluster than the one that is applied"
    if parse_lsn(source["flush_lsn"]) < parse_lsn(report["lowest_remote_lsn"]):
        return "LESS than is applied: put back to an older state, or a standby that replays"
    return ""


def _lag_bytes(report: dict[str, Any]) -> int | None:
    low = report["lowest_remote_lsn"]
    if low is None or stranger(report):
        return None
    return parse_lsn(report["source"]["flush_lsn"]) - parse_lsn(low)


def _documents(found: Sequence[blocked.BlockedSession]) -> list[dict[str, Any]]:
    return [{**msgspec.structs.asdict(one), "line": one.line()} for one in found]


async def collect(config: Config) -> dict[str, Any]:
    """Look once; returns and raises what `StateReader.read` does."""
    async with StateReader(config) as reader:
        return await reader.read()


def _unreachable(error: str) -> dict[str, Any]:
    """Return the report on a source that was not asked, with the keys of one that was."""
    return {**dict.fromkeys(SourceDocument.__struct_fields__), "is_reachable": False, "error": error, "blocked": []}


def _of_source(facts: slot.SourceFacts) -> dict[str, Any]:
    found = facts.slot
    return {
        "is_reachable": True,
        "error": None,
        "system_identifier": facts.system_identifier,
        "timeline": facts.timeline,
        "flush_lsn": format_lsn(facts.flush_lsn),
        "slot_exists": found is not None,
        "slot_active_pid": found.active_pid if found else None,
        "slot_wal_status": found.wal_status if found else None,
        "slot_retained_wal_bytes": found.retained_bytes(facts.flush_lsn) if found else None,
        "slot_safe_wal_bytes": found.safe_wal_bytes if found else None,
        "slot_invalidation_reason": found.invalidation_reason if found else None,
        "slot_confirmed_flush_lsn": lsn_text(found.confirmed_flush_lsn) if found else None,
    }
