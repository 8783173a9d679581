"""The verdict in one line: the limit with the largest part of the time, its evidence and advice. Pure.

In go rows of seconds by state, of reading times, and of samples of the workers' sessions; out come the parts of the
time by limit and a `LimitVerdict`. The report has them from the apply log, the daemon from its own last minutes. The
time is divided by the state at each moment:

- a batch stood at a lock of another session, whatever else waited: the *target*;
- a worker was free and nothing waited for it: the *throttle*, as long as apply.max_changes_per_s held changes back.
  Else the *source* had nothing more. Where it had more, that was not read, the *publisher* was waited for, or the
  *leader* was busy;
- a worker was free, and a batch waited for another one's commit, or all had a batch and late rows were being applied:
  a *dependency*;
- all had a batch, and most of them waited for commits: *commit*;
- all had a batch and executed: the *target*, by what its sessions waited for (pg_stat_activity). Sessions that wait to
  flush WAL count as *commit*, sessions that wait for the daemon as *leader* if its processor was full, else as the
  way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Rows of the report's tables by column, as docs/REPORT.md names them.
Rows = list[dict[str, Any]]

#: WAL that is not read yet and is no backlog: what is on its way.
BEHIND_BYTES: Final = 1 << 20
#: Seconds after which a wait for a foreign session is shown: in the log, and as the reason of the state.
BLOCKED_S: Final = 5.0
#: Seconds between two lines about one wait at most.
_LONGEST_S: Final = 600.0
#: Part of a processor from which on the leader has no more to give: it shares the machine, and is seen once a second.
_FULL: Final = 0.7
FLUSHES: Final = ("IO:WALSync", "IO:WALWrite", "LWLock:WALWrite", "IPC:SyncRep", "IO:WalSync", "IO:WalWrite")

#: The limit that is a setting: apply.max_changes_per_s.
THROTTLE: Final = "throttle"
_ADVICE: Final = {
    (THROTTLE, ""): "raise apply.max_changes_per_s, or set it to 0, once the target may have more to do",
    ("source", ""): "nothing: more workers or other settings would not make it faster",
    ("publisher", ""): (
        "look at the publisher: one WAL sender decodes on one processor, and the network is between; if a backlog was "
        "read as a stream, the log's catch_up_declined says why"
    ),
    ("leader", ""): (
        "a processor for the daemon alone, or a faster one; applylog.detail = 'batch' if it is 'transaction'; two "
        "slots with half of the tables each, if a transaction may come in two parts and no foreign key leads across"
    ),
    ("dependency", ""): (
        "more workers do not help: spread the changes of the rows named below over more rows, or change them in fewer "
        "transactions"
    ),
    ("dependency", "barrier"): "more workers do not help: parapply.tables says what runs alone, and why",
    ("dependency", "table"): (
        "give the table a key that the daemon can use, so that its rows can be told apart: see parapply check"
    ),
    ("commit", "flush"): (
        "target.synchronous_commit = 'off' for the daemon's sessions, where it is on (what is not durable is never "
        "confirmed); a faster disk for the target's WAL; larger batches"
    ),
    ("commit", "order"): (
        "apply.commit_order = 'relaxed' if readers may see transactions out of order; larger batches; a shorter way to "
        "the target"
    ),
    ("target", "CPU"): (
        "more workers while the target has idle processors; fewer indexes and triggers on the busiest tables"
    ),
    ("target", "disk"): "more workers: they wait for the disk at the same time; more shared_buffers; a faster disk",
    (
        "target",
        "locks",
    ): "look at the sessions that hold the locks on the target, as named here, and end those that need none",
    ("target", "network"): "a shorter way between daemon and target; more workers wait at the same time",
    ("target", ""): "more workers while the target has idle processors",
}
_WORDS: Final = {
    THROTTLE: "The throttle: apply.max_changes_per_s held changes back",
    "source": "The source: it had nothing more that was due",
    "publisher": "The publisher: there was more to read, and it did not come faster",
    "leader": "The daemon's leader: it had a processor for itself, and that was full",
    "dependency": "Dependencies",
    "commit": "Commits",
    "target": "The target",
}
_DETAIL_WORDS: Final = {
    ("commit", "flush"): "Commits: flushing the target's WAL",
    ("commit", "order"): "Commits: one after the other, in source order",
    ("target", "CPU"): "The target: all workers executed statements, on its processors",
    ("target", "disk"): "The target: all workers executed statements, and waited for its disk",
    ("target", "locks"): "The target: statements waited for locks of other sessions",
    ("target", "network"): "The way to the target: its sessions waited for the next message",
    ("target", ""): "The target: all workers executed statements",
}


@dataclass(frozen=True, kw_only=True)
class LimitVerdict:
    """The limit of one slot.

    Attributes:
        limit: throttle, source, publisher, leader, dependency, commit or target.
        detail: which sort of it, or empty.
        share: part of the time.
        words: one sentence, with the number.
        advice: what to do.
        evidence: what it is concluded from, most important first.
    """

    limit: str
    detail: str
    share: float
    words: str
    advice: str
    evidence: tuple[str, ...]


def next_line_s(wait_s: float) -> float:
    """Return after how many seconds a wait is logged again that was logged after some; first after `BLOCKED_S`."""
    return min(2 * wait_s, wait_s + _LONGEST_S)


def state_of(*, workers: int, queued: int, blocked: int, held: int, executing: int, late: int) -> str:  # noqa: PLR0913
    """Return what there is at a moment; the report's figure `moments` says the same in SQL.

    Args:
        workers: number of all.
        queued: batches that no worker has.
        blocked: of these, batches that wait for another one's commit.
        held: batches that a worker has.
        executing: of these, batches whose statements run.
        late: of these, batches whose late rows are being applied.
    """
    if not held + queued:
        return "nothing"
    if held < workers:
        return "dependency" if blocked else "worker free"
    if 2 * executing >= held:
        return "executing"
    return "late rows" if late else "commit"


def limits(moments: Rows, reading: Rows, backends: Rows, blockers: Rows) -> Rows:
    """Return the rows of `limits` of one slot, the largest first, without the column `slot`."""
    seconds = {row["state"]: row["seconds"] for row in moments}
    found: dict[tuple[str, str], float] = {}

    def add(limit: str, detail: str, by_s: float) -> None:
        if by_s > 0:
            found[limit, detail] = found.get((limit, detail), 0.0) + by_s

    # A batch that stands at a lock is no free worker's want of work, nor a dependency of those that wait for it.
    locked = _share(backends, is_lock)
    for state in ("worker free", "dependency", "commit"):
        add("target", "locks", seconds.get(state, 0.0) * locked)
    free_s = seconds.get("nothing", 0.0) + seconds.get("worker free", 0.0) * (1 - locked)
    for limit, part_s in _of_free_workers(free_s, reading):
        add(limit, "", part_s)
    waited_s = seconds.get("dependency", 0.0) * (1 - locked) + seconds.get("late rows", 0.0)
    add("dependency", _dependency(blockers), waited_s)
    flush = _share(backends, is_flush)
    add("commit", "flush" if flush > _HALF else "order", seconds.get("commit", 0.0) * (1 - locked))
    for limit, detail, share in _of_target(backends, reading):
        add(limit, detail, seconds.get("executing", 0.0) * share)
    total_s = sum(found.values())
    return [
        {"cause": limit, "detail": detail, "seconds": part_s, "share": part_s / total_s}
        for (limit, detail), part_s in sorted(found.items(), key=lambda item: (-item[1], item[0]))
    ]


_HALF: Final = 0.5
#: Part of the time from which on a limit is named though the source had nothing more for a larger one.
_NOTABLE: Final = 0.4


def _of_free_workers(free_s: float, reading: Rows) -> Iterable[tuple[str, float]]:
    """Divide the seconds in which workers were free among throttle, source, publisher and leader."""
    throttled_s = min(free_s, reading[0]["throttled_s"]) if reading else 0.0
    yield THROTTLE, throttled_s
    free_s -= throttled_s
    behind_s = min(free_s, reading[0]["behind_s"]) if reading else 0.0
    yield "source", free_s - behind_s
    if behind_s:
        row = reading[0]
        is_full = row["behind_cpu_s"] >= _FULL * row["behind_s"] or row["behind_publisher_s"] < row["behind_cpu_s"]
        yield "leader" if is_full else "publisher", behind_s


def _of_target(backends: Rows, reading: Rows) -> Iterable[tuple[str, str, float]]:
    """Return the use of the time in which all workers executed: limit, detail, part."""
    if not sum(row["samples"] for row in backends):
        yield "target", "", 1.0
        return
    row = reading[0]
    is_leader_full = row["leader_cpu_s"] >= _FULL * row["seconds"]
    parts: dict[tuple[str, str], int] = {}
    for one in backends:
        limit = _sort_of(one["wait"])
        if limit == ("target", "network") and is_leader_full:
            limit = "leader", ""
        parts[limit] = parts.get(limit, 0) + one["samples"]
    all_samples = sum(parts.values())
    for (limit_name, detail), samples in parts.items():
        yield limit_name, detail, samples / all_samples


def is_flush(wait: str) -> bool:
    """Return whether a session with this wait flushes WAL."""
    return wait in FLUSHES


def is_lock(wait: str) -> bool:
    """Return whether a session waits for a lock of another one; waiting while a file is extended is work."""
    return wait.startswith("Lock:") and wait not in ("Lock:extend", "Lock:page")


def _sort_of(wait: str) -> tuple[str, str]:
    if is_flush(wait):
        return "commit", "flush"
    if wait == "client":
        return "target", "network"
    if wait == "CPU":
        return "target", "CPU"
    return "target", "disk" if wait.startswith("IO:") or wait == "LWLock:BufferIO" else "locks"


def _share(backends: Rows, belongs: Any) -> float:  # noqa: ANN401  a function of a text
    samples = sum(row["samples"] for row in backends)
    return sum(row["samples"] for row in backends if belongs(row["wait"])) / samples if samples else 0.0


def _dependency(blockers: Rows) -> str:
    """Return `barrier` or `table` where most of the longest waits were for one, else nothing."""
    total_s = sum(row["wait_s"] for row in blockers)
    for kind in ("barrier", "table"):
        if total_s and sum(row["wait_s"] for row in blockers if row["kind"] == kind) > _HALF * total_s:
            return kind
    return ""


def said(  # noqa: PLR0913, PLR0917  what there is to say
    rows: Rows, reading: Rows, backends: Rows, span: str, named: str = "", more: Iterable[str] = ()
) -> LimitVerdict | None:
    """Return the verdict; None where nothing was under way long enough to be measured.

    Args:
        rows: of `limits`.
        reading: one row, or none where it was not measured.
        backends: samples, the most first.
        span: the time that was looked at.
        named: the dependency that was waited for longest, if that is what limits.
        more: evidence that comes after the parts of the time.
    """
    if not rows:
        return None
    first = rows[0]
    if first["cause"] == "source":
        # "Nothing to do" is no answer where something else takes a good part of the time.
        first = next((row for row in rows[1:] if row["share"] >= _NOTABLE), first)
    limit, detail = first["cause"], first["detail"]
    words = _DETAIL_WORDS.get((limit, detail), _WORDS[limit])
    named = named if limit == "dependency" else ""
    return LimitVerdict(
        limit=limit,
        detail=detail,
        share=first["share"],
        words=f"{words}{f' on {named}' if named else ''}, {_percent(first['share'])} of the time.",
        advice=_ADVICE.get((limit, detail)) or _ADVICE[limit, ""],
        evidence=tuple(_evidence(limit, rows, reading, backends, span, more)),
    )


def held_by(locks: Rows) -> Iterable[str]:
    """Return the evidence of who held locks, by rows with `seconds`, the most first.

    They are seen once a second, so that a shorter wait may be missed, or count as a second.
    """
    for row in locks[:_MOST_HOLDERS]:
        who = f"role {row['role']}, pid {row['pid']}" if row["pid"] else "a prepared transaction"
        where = f", on {row['relation']}" if row["relation"] else ""
        yield f"Locks: held by {who}{where}, {row['seconds']:.0f} seconds ({row['mode']} was asked for)."


#: Sessions named that hold locks.
_MOST_HOLDERS: Final = 3


def named(wait: dict[str, Any]) -> str:
    """Return the object of a wait in words: `kind`, `name` and `table` of it."""
    what = f"{wait['kind']} {wait['name']}".strip()
    return f"{what} in {wait['table']}" if wait["table"] else what


def _evidence(  # noqa: PLR0913, PLR0917  what there is to say
    limit: str, rows: Rows, reading: Rows, backends: Rows, span: str, more: Iterable[str]
) -> Iterable[str]:
    parts = [f"{' '.join((row['cause'], row['detail'])).strip()} {_percent(row['share'])}" for row in rows]
    yield f"Of the {span}: {', '.join(parts)}."
    yield from more
    samples = sum(row["samples"] for row in backends)
    if samples and limit in ("commit", "target", "leader"):
        most = ", ".join(f"{row['wait']} {_percent(row['samples'] / samples)}" for row in backends[:4])
        yield f"Of {samples:,} samples of the workers' sessions on the target: {most}."
    for row in reading:
        if row["throttled_s"]:
            yield f"apply.max_changes_per_s held changes back for {row['throttled_s']:.1f} s."
        yield (
            f"In {row['seconds']:.1f} s with work the leader took {row['leader_cpu_s']:.1f} s of CPU, waited "
            f"{row['publisher_s']:.1f} s for the publisher, and had enough at hand for {row['paused_s']:.1f} s. "
            f"{row['last_behind_bytes'] / 1e6:,.1f} MB were not read at the end."
        )


def _percent(share: float) -> str:
    # A plain space: terminals get it, and there every other one is escaped.
    return f"{share * 100:.0f} %"
