"""A publisher with rows: clients whose transactions run alongside each other, and the stream of their changes.

A change that would wait for another client's lock is not made, so every stream is one that PostgreSQL could send.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from parapply.model import Transaction
from parapply.plan.table import Plans
from tests import build
from tests.simulate.source import Batches, Event
from tests.simulate.tables import Change, Refused, Session, Tables
from tests.unit.foreign_key_model import CHILD, PARENT, plan_of

if TYPE_CHECKING:
    from tests.simulate.draws import Draws
    from tests.simulate.tables import Locks, Written
    from tests.unit.foreign_key_model import Row, Rows

_STEP: Final = 0x20
_MOST_CLIENTS: Final = 3
_KINDS: Final = ("whole", "whole", "whole", "whole", "stream", "stream", "large")


class _Client(Session):
    """One client's transaction."""

    def __init__(self, xid: int, kind: str) -> None:
        """Start without a change."""
        super().__init__()
        self.xid = xid
        self.kind = kind
        #: Not sent yet; of a whole one all.
        self.frames: list[bytes] = []
        self.is_streamed = False
        #: Number of the open subtransaction, and the state before it.
        self.sub = 0
        self.before: tuple[Written, Locks] = ({}, {})
        self.n_subs = 0


class RowSource(Batches):
    """Stream of one publisher, with the rows after each transaction."""

    def __init__(self, draws: Draws) -> None:
        """Draw clients and their changes; few rows, because changes that never meet prove nothing."""
        super().__init__(draws)
        #: The stream has whole old rows. Else relaxed order has no table with a further unique index.
        self.is_full = self.may_be_relaxed = draws.chance(0.6)
        self.plans, self._relaxed_plans = Plans(), Plans()
        for table in (PARENT, CHILD):
            plan = plan_of(table, is_full=self.is_full, is_enforced=True)
            # As `match` has it in relaxed order.
            for plans, known in ((self.plans, plan), (self._relaxed_plans, replace(plan, keeps_written_over=True))):
                plans.known[plan.relation] = known
                plans.announce(plan.relation)
        self.tables = Tables()
        #: Rows when all up to a position is visible.
        self.states: dict[int, Rows] = {0: {PARENT: {}, CHILD: {}}}
        self._clients: list[_Client] = []
        self._prepared: dict[int, _Client] = {}
        self._n_keys = 1 + draws.below(4)
        self._n_kinds = (1, 1, len(_KINDS))[draws.below(3)]
        self._p_end = (0.2, 0.4, 0.7)[draws.below(3)]
        for _ in range(3 + draws.below(60)):
            self._act()
        for client in list(self._clients):
            self._end(client)
        for xid in list(self._prepared):
            self._decide(xid)
        self.finish()

    def plans_of(self, *, is_relaxed: bool) -> Plans:
        """As `Batches.plans_of`."""
        return self._relaxed_plans if is_relaxed else self.plans

    def _act(self) -> None:
        draws = self.draws
        at = draws.below(min(len(self._clients) + 1, _MOST_CLIENTS))
        if at == len(self._clients):
            self.n_xids += 1
            self._clients.append(_Client(self.n_xids, _KINDS[draws.below(self._n_kinds)]))
        client = self._clients[at]
        if client.kind == "stream":
            self._savepoint(client)
        self._wish(client)
        if client.kind == "stream" and draws.chance(0.5):
            self._chunk(client)
        if draws.chance(self._p_end):
            self._end(client)
        if self._prepared and draws.chance(0.2):
            self._decide([*self._prepared][draws.below(len(self._prepared))])

    def _wish(self, client: _Client) -> None:
        """Make one change, if it is possible without a wait."""
        draws, tables = self.draws, self.tables
        table, key, value = (PARENT, CHILD)[draws.below(2)], draws.below(self._n_keys), draws.below(self._n_keys + 1)
        old = tables.row(client, table, key)
        new: Row | None = (key, value or None)
        if table == CHILD and value:
            new = (key, value - 1)
        if old is not None:
            what = draws.below(4)
            if what == 0:
                new = None
            elif what == 1:
                new = (value, old[1])
        change = Change(table, None if old is None else key, new)
        written, locks = dict(client.written), dict(client.locks)
        try:
            if tables.blocker(client, change) is None:
                tables.apply(client, change)
                client.frames.append(build.xlog_data(self._message(change, old)))
        except Refused:
            tables.go_back(client, written, locks)

    def _message(self, change: Change, old: Row | None) -> bytes:
        table, _, new, _ = change
        if old is None:
            assert new is not None
            return build.insert(_cells(new), oid=table)
        key = build.row(build.text(b"%d" % old[0]), build.null())
        if new is None:
            return build.delete(old=_cells(old), oid=table) if self.is_full else build.delete(key=key, oid=table)
        if self.is_full:
            return build.update(_cells(new), old=_cells(old), oid=table)
        return build.update(_cells(new), key=key if old[0] != new[0] else None, oid=table)

    def _savepoint(self, client: _Client) -> None:
        """Begin a subtransaction, or end one: half of them are rolled back."""
        if not self.draws.chance(0.2):
            return
        self._chunk(client)
        if not client.sub:
            client.n_subs += 1
            client.sub = client.n_subs
            client.before = dict(client.written), dict(client.locks)
            return
        if self.draws.chance(0.5):
            self.tables.go_back(client, *client.before)
            self.events.append(Event("sub", client.xid, 0, sub=client.sub))
        client.sub = 0

    def _chunk(self, client: _Client) -> None:
        if client.frames:
            client.is_streamed = True
            piece = self._transaction(client, 0)
            self.events.append(Event("chunk", client.xid, 0, piece, sub=client.sub))

    def _transaction(self, client: _Client, end_lsn: int) -> Transaction:
        transaction = Transaction(client.xid, end_lsn, end_lsn)
        transaction.end_lsn = end_lsn
        transaction.changes += client.frames
        transaction.size_bytes = sum(map(len, client.frames))
        client.frames = []
        return transaction

    def _end(self, client: _Client) -> None:
        draws = self.draws
        self._clients.remove(client)
        if client.kind == "stream":
            self._chunk(client)
        if not (client.frames or client.is_streamed) or draws.chance(0.1):
            self.tables.release(client)
            if client.is_streamed:
                self.events.append(Event("abort", client.xid, 0))
            return
        is_prepared = self._n_kinds > 1 and draws.chance(0.2)
        self._send_end(client, is_prepared=is_prepared)
        if is_prepared:
            self._prepared[client.xid] = client
        else:
            self._visible(client)

    def _send_end(self, client: _Client, *, is_prepared: bool) -> None:
        lsn = self.next_lsn()
        if client.kind == "stream":
            self.events.append(Event("prepare" if is_prepared else "commit", client.xid, lsn))
        elif client.kind == "whole":
            transaction = self._transaction(client, lsn)
            self.transactions.append(transaction)
            self.events.append(Event("whole", client.xid, lsn, transaction, is_prepared=is_prepared))
        else:
            frames, client.frames = client.frames, []
            size = 1 + self.draws.below(3)
            for at in range(0, len(frames), size):
                client.frames = frames[at : at + size]
                is_last = at + size >= len(frames)
                kind, end = ("last", lsn) if is_last else ("piece", 0)
                piece = self._transaction(client, end)
                self.events.append(Event(kind, client.xid, end, piece, is_prepared=is_last and is_prepared))

    def _visible(self, client: _Client) -> None:
        self.tables.commit(client)
        self.states[self.last_lsn] = {table: dict(rows) for table, rows in self.tables.rows.items()}

    def _decide(self, xid: int) -> None:
        client, is_commit = self._prepared.pop(xid), not self.draws.chance(0.4)
        self.events.append(Event("outcome", xid, self.next_lsn(), is_commit=is_commit))
        if is_commit:
            self._visible(client)
        else:
            self.tables.release(client)


def _cells(row: Row) -> bytes:
    return build.row(*[build.null() if value is None else build.text(b"%d" % value) for value in row])
