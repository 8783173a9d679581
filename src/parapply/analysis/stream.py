"""The stream that the batches of a log were made of: source transactions whose changes meet where the log says so.

In: `Recorded` batches of one run in source order, and when each could be read. Out: a `LoggedStream`. Pure.

A log holds no keys, so the changes that two batches have in common are made again from the waits. A listed late key is
one row, by its hash. Further late keys are taken for the run's hottest rows where the list is full, else for rows of
the batch and its holder alone. A batch that waited as a whole shares a table with its holder that no other batch
changes. Batches that were not under way beside each other in the log meet as often as those that were, by chance.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import Counter
from itertools import accumulate, pairwise
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

from parapply.analysis.contention import MOST
from parapply.applylog_schema import LATE_ROWS_LIMIT
from parapply.engine.intake import AHEAD
from parapply.model import FRAME_HEADER_BYTES, Column, Relation, Transaction
from parapply.plan.table import ColumnFacts, Equality, Lane, Plans, TableFacts, TablePlan
from parapply.vocabulary import WaitKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Units of a stream at most, and of a batch: so finely batches are formed again.
_MOST_UNITS: Final = 12_000
_MOST_OF_A_BATCH: Final = 8
#: Units that a batch of other limits has at least.
_LEAST_OF_A_BATCH: Final = 4
#: Keys at most that a unit shares with others by each of the rules.
_MOST_KEYS: Final = 64
#: Batches that list a row from which on it is hot: each unit of them changes it.
_HOT: Final = 4
#: The name of a row that stands for the hot ones of two batches that are not listed.
HOT: Final = b"hot"
#: Batches before the last one on whose part in a wait the log is silent, but which waits for the same.
_CLOSE: Final = 2
#: The publisher's OID of the table that has all the keys; others are of one wait each.
_ROWS: Final = 1
#: Microseconds since 2000-01-01 of the first moment of a stream: a commit may be long before it.
BEGIN_US: Final = 1 << 55
_INT4_OID: Final = 23


class Recorded(NamedTuple):
    """A batch's record; seconds are of one clock, but `due_s`."""

    seq: int
    transactions: int
    changes: int
    size_bytes: int
    tables: int
    received_s: float
    started_s: float
    committed_s: float
    due_s: float  # its last transaction's commit, by the publisher's clock
    execute_s: float
    commit_s: float
    late_rows: int = 0
    holder_seq: int = -1  # the batch that it, or its late rows, waited for last
    waits: bool = False  # as a whole
    is_one_flight: bool = False
    flight_commit_s: float = 0.0
    keys: Sequence[str] = ()  # hashes of some late rows
    kind: str = ""  # of the last wait
    is_alone: bool = False  # pieces, an outcome or a TRUNCATE: nothing runs beside it

    @property
    def has_hot(self) -> bool:
        """Return whether the late rows that are not listed are taken for the run's hottest ones."""
        return len(self.keys) >= LATE_ROWS_LIMIT


class Unit(NamedTuple):
    """Neighbouring source transactions that stay together."""

    transaction: Transaction  # the changes that others also make, and one that no other makes
    transactions: int
    changes: int
    tables: int
    release_s: float  # when it can be read at the earliest; ascending
    due_s: float  # the same by the publisher's commit alone: a unit that is read later is late
    batch: int  # place of its batch among the recorded ones
    is_alone: bool


class LoggedStream(NamedTuple):
    """A stream that can be played any number of times."""

    units: Sequence[Unit]
    plans: Plans
    #: Of all pairs of changes in flight together, the part that is of one row which is not hot.
    pairs: float


def stream_of(
    recorded: Sequence[Recorded], releases_s: Sequence[float], dues_s: Sequence[float], *, changes: int = 0
) -> LoggedStream:
    """Return the stream of a run.

    Args:
        recorded: its batches, at least one.
        releases_s: when the last transaction of each could be read, ascending.
        dues_s: the same by the publisher's commit alone.
        changes: or transactions, of a batch at most; 0: as in the log.
    """
    cuts = [_cut(one, len(recorded), changes) for one in recorded]
    firsts = [0, *accumulate(cuts)]
    sizes = [size for one, n in zip(recorded, cuts, strict=True) for size in _shares(one.changes, n)]
    meetings = _Meetings(firsts[-1])
    counted = Counter([key for one in recorded for key in one.keys])
    place_of = {one.seq: place for place, one in enumerate(recorded)}
    for place, one in enumerate(recorded):
        holder = place_of.get(one.holder_seq)
        if holder is not None:
            mine, theirs = range(firsts[place], firsts[place + 1]), range(firsts[holder], firsts[holder + 1])
            meetings.add(one, mine, theirs, counted)
    seen, pairs = _seen(recorded, counted)
    in_flight = (MOST + AHEAD) * max(1, firsts[-1] // len(recorded))
    meetings.draw(pairs, sizes, seen, firsts, in_flight)
    alone = _alone(recorded, place_of)
    units, before_s = [], 0.0
    for place, (one, n) in enumerate(zip(recorded, cuts, strict=True)):
        shares = zip(_shares(one.transactions, n), _shares(one.size_bytes, n), strict=True)
        for index, (transactions, size_bytes) in enumerate(shares):
            number = firsts[place] + index
            transaction = Transaction(number & 0xFFFFFFFF, number + 1, BEGIN_US + round(dues_s[place] * 1e6))
            transaction.end_lsn, transaction.size_bytes = number + 1, size_bytes
            transaction.changes.extend(meetings.frames[number])
            release_s = before_s + (releases_s[place] - before_s) * (index + 1) / n
            units.append(
                Unit(
                    transaction, max(1, transactions), max(1, sizes[number]), one.tables, release_s, dues_s[place],
                    place, one.is_alone or (alone[place] and not index),
                )
            )  # fmt: skip
        before_s = releases_s[place]
    return LoggedStream(units, meetings.plans, pairs)


def _cut(one: Recorded, n_recorded: int, changes: int) -> int:
    if one.is_alone:
        return 1
    most = max(1, min(_MOST_OF_A_BATCH, _MOST_UNITS // n_recorded))
    if changes:
        most = max(most, -(-_LEAST_OF_A_BATCH * max(one.changes, one.transactions) // changes))
    return max(1, min(most, one.transactions))


def _shares(whole: int, n: int) -> Iterator[int]:
    return (whole * (index + 1) // n - whole * index // n for index in range(n))


def _alone(recorded: Sequence[Recorded], place_of: dict[int, int]) -> list[bool]:
    """Return which batches run alone: a wait for a barrier is due to the earlier batch, or to the later one.

    It is due to the earlier one if that is known to run alone, if several wait for it so, or if the later one had late
    rows, which it has beside others only.
    """
    found = [one.is_alone for one in recorded]
    waiting = Counter([one.holder_seq for one in recorded if one.kind == WaitKind.BARRIER])
    for place, one in enumerate(recorded):
        if one.kind != WaitKind.BARRIER:
            continue
        holder = place_of.get(one.holder_seq)
        if holder is not None and (found[holder] or one.late_rows or waiting[one.holder_seq] > 1):
            found[holder] = True
        else:
            found[place] = True
    return found


def _seen(recorded: Sequence[Recorded], counted: Counter[str]) -> tuple[list[set[int]], float]:
    """Return for each batch the earlier ones with which it shares just the listed rows, and `LoggedStream.pairs`."""
    seen: list[set[int]] = []
    pairs, late_rows = 0, 0
    open_: list[int] = []
    for place, one in enumerate(recorded):
        # A batch that commits before this one starts still counts if other rows make this one late (`Scheduler`).
        open_ = [each for each in open_ if recorded[each].committed_s > one.received_s]
        known = [each for each in open_ if one.late_rows or recorded[each].committed_s > one.started_s]
        seen.append(set(known))
        open_.append(place)
        if known and not one.waits:
            pairs += one.changes * sum([recorded[each].changes for each in known])
            n_rare = sum([counted[key] < _HOT for key in one.keys])
            late_rows += n_rare if one.has_hot else n_rare + one.late_rows - len(one.keys)
    return seen, late_rows / pairs if pairs else 0.0


class _Meetings:
    """The frames of each unit: a change of a key that no other has, and changes of keys and tables that it shares."""

    def __init__(self, n_units: int) -> None:
        self.plans = Plans()
        self.plans.may_be_serial = False
        self.plans.current[_ROWS] = table_plan(_ROWS, is_exclusive=False)
        self.frames = [[_update(_ROWS, b"unit %d" % number)] for number in range(n_units)]
        # Drawn alike each time, so that a difference is one of what is played.
        self._random = Random(0)  # noqa: S311  no secret

    def add(self, one: Recorded, mine: range, theirs: range, counted: Counter[str]) -> None:
        """Have the units of a batch meet its holder's as the log says."""
        is_close = len(mine) > 1 and mine[0] - theirs[-1] <= _CLOSE * len(mine)
        if one.waits and not one.late_rows:
            if one.kind != WaitKind.BARRIER:
                chain = [theirs[-1], *mine] if is_close else [theirs[-1], mine[0]]
                for earlier, later in pairwise(chain):
                    self._share_table(earlier, later)
            return
        for key in one.keys:
            name = key.encode()
            if counted[key] >= _HOT:
                self._share(name, *mine, *theirs)
            else:
                self._share(name, self._random.choice(mine), self._random.choice(theirs))
        if one.has_hot:
            # Their number follows from the number of changes (`Costs.hot_rows`).
            self._share(HOT, *mine, *theirs)
            return
        for index in range(min(_MOST_KEYS, one.late_rows - len(one.keys))):
            self._share(b"%d of %d" % (index, one.seq), self._random.choice(mine), self._random.choice(theirs))

    def draw(
        self, pairs: float, sizes: Sequence[int], seen: Sequence[set[int]], firsts: Sequence[int], in_flight: int
    ) -> None:
        """Have units meet by chance of whose rows the log says nothing.

        Args:
            pairs: likelihood for each pair of changes.
            sizes: changes of each unit.
            seen: of each batch the places of those whose common rows with it are known.
            firsts: first unit of each batch, and the number of units.
            in_flight: units at most between two that meet.
        """
        if not pairs:
            return
        sums = [0, *accumulate(sizes)]
        for place, (first, end) in enumerate(pairwise(firsts)):
            for unit in range(first, end):
                begin = max(0, min(first, unit - in_flight))
                for _ in range(self._drawn(pairs * sizes[unit] * (sums[unit] - sums[begin]))):
                    at = bisect_right(sums, self._random.uniform(sums[begin], sums[unit] - 1)) - 1
                    if bisect_right(firsts, at) - 1 not in seen[place]:
                        self._share(b"%d by %d %d" % (at, unit, len(self.frames[unit])), at, unit)

    def _drawn(self, expected: float) -> int:
        """Return how many of rare events happen (Poisson): the times between them are exponential."""
        number, at = 0, self._random.expovariate(1.0)
        while at < expected and number < _MOST_KEYS:
            number, at = number + 1, at + self._random.expovariate(1.0)
        return number

    def _share(self, name: bytes, *units: int) -> None:
        frame = _update(_ROWS, name)
        for unit in units:
            if frame not in self.frames[unit]:
                self.frames[unit].append(frame)

    def _share_table(self, *units: int) -> None:
        oid = _ROWS + len(self.plans.current)
        self.plans.current[oid] = table_plan(oid, is_exclusive=True)
        for unit in units:
            self.frames[unit].append(_update(oid, b""))


def _update(oid: int, key: bytes) -> bytes:
    """Return a change as the publisher sends it, of a table of one column."""
    return bytes(FRAME_HEADER_BYTES) + struct.pack("!cIcHcI", b"U", oid, b"N", 1, b"t", len(key)) + key


def table_plan(oid: int, *, is_exclusive: bool) -> TablePlan:
    """Return the plan of a table whose only column is its key."""
    column = ColumnFacts(
        name="key", type_sql="", type_oid=_INT4_OID, base_type_oid=_INT4_OID, is_generated=False,
        is_identity_always=False, has_equality=True, equality=Equality.BYTES,
    )  # fmt: skip
    facts = TableFacts(
        oid=oid, schema="", name="", is_partitioned=False, columns=(column,), key_columns=("key",),
        key_is_deferrable=False, triggers=(), rules=(), code=(), unique=(), foreign_keys=(), root_oid=oid,
    )  # fmt: skip
    sent = Column(name="key", type_oid=_INT4_OID, type_modifier=-1, is_key=True)
    return TablePlan(
        relation=Relation(oid=oid, schema="", name="", replica_identity="d", columns=(sent,)), facts=facts,
        columns=(column,), key_positions=(0,), is_full=False, can_update=True, refusal="", lane=Lane.SET,
        is_table_exclusive=is_exclusive, reason="",
    )  # fmt: skip
