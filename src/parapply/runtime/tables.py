"""The plan of every announced relation: read from the target when it is announced, and again when it may be stale.

The hot path never waits here: a relation is announced once a stream, and again after a schema change. What changes on
the target alone is noticed by `watch.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from msgspec.structs import replace

from parapply.errors import TargetRefused
from parapply.logs import get_logger
from parapply.plan.plans import Plans
from parapply.plan.table import Lane
from parapply.plan.trust import Level, Trust
from parapply.target import facts, match
from parapply.target.state import TableRow

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from parapply.config import TableConfig
    from parapply.conflict.rules import Rules
    from parapply.model import Relation
    from parapply.plan.batch import Batch
    from parapply.plan.table import TableFacts, TablePlan
    from parapply.runtime.ahead import FactsAhead
    from parapply.runtime.desk import Desk
    from parapply.target.settings import Connection


class Tables:
    """Plans by relation. Written by intake (`resolve`), by workers and by the watch, read by all of them."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        desk: Desk,
        ahead: FactsAhead,
        role: str,
        config: Mapping[str, TableConfig],
        *,
        is_relaxed: bool = False,
        rules: Rules | None = None,
        own_origins: tuple[int, ...] = (),
    ) -> None:
        """Start with nothing announced.

        Args:
            desk: sessions for reading the catalogue.
            ahead: what was read of it while the stream started.
            role: session_replication_role of the workers.
            config: what the configuration says of single tables, by schema.table.
            is_relaxed: independent transactions commit in any order.
            rules: policies of conflicts; they may want rows looked at before they are changed.
            own_origins: replication origins of the workers.
        """
        #: In force where intake reads. Batches and retries keep their own view of `current`.
        self.plans = Plans()
        self._desk = desk
        self._ahead = ahead
        self._role = role
        self._config = config
        self._is_relaxed = is_relaxed
        self._rules = rules
        self._own_origins = own_origins
        #: As the catalogue has it; `plans` holds what trust in prediction leaves of it.
        self._planned: dict[Relation, TablePlan] = {}
        #: Names and publisher's OIDs of what was ever planned.
        self._names: set[str | int] = set()
        self._trust: dict[str, Trust] = {}
        self._has_changed = False
        #: Set when a batch failed in a way that a change of the tables may explain; the watch then looks at once.
        self.is_in_doubt = asyncio.Event()
        self._to_show: set[Relation] = set()
        self._log = get_logger()

    @property
    def in_force(self) -> dict[Relation, int]:
        """Return the relations in force where intake reads, each with the OID of its target table."""
        return {plan.relation: plan.facts.oid for plan in self.plans.current.values()}

    def take_changed(self) -> bool:
        """Tell whether a plan has changed since the last call: what is planned from now on must not run beside before.

        The facts of two plans cannot be compared: an index may be in one of them only.
        """
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    async def resolve(self, relations: Iterable[Relation]) -> None:
        """Find the target table of each announced relation.

        A missing table, column or privilege is kept in `plans.refused` until a change needs it.

        Raises:
            TargetLost: the connection ended.
        """
        for relation in relations:
            try:
                plan = await self._plan_ahead(relation) or await self._plan(relation)
            except TargetRefused as error:
                self.plans.refused[relation] = error
                self._forget_namesakes(relation)
                continue
            # Not before: a worker that follows a transaction in progress finds it planned or refused at any time.
            self.plans.refused.pop(relation, None)
            self._put(relation, plan)
            self._forget_namesakes(relation)
        self._look_for_serial()

    async def resolve_streamed(self, relations: Iterable[Relation]) -> None:
        """Find the target tables of relations announced inside a transaction in progress; nothing is in force by that.

        What is in force for others changes when it commits, if it does (trap T-52).

        Raises:
            TargetLost: the connection ended.
        """
        for relation in relations:
            if relation in self.plans.known:
                continue
            try:
                plan = await self._plan(relation)
            except TargetRefused as error:
                self.plans.refused[relation] = error
                continue
            self.plans.refused.pop(relation, None)
            self._put(relation, plan)
        self._look_for_serial()

    def _put(self, relation: Relation, plan: TablePlan) -> None:
        """Keep a plan; an equal one stays the same object, so that statements and open segments go on."""
        if self._planned.get(relation) == plan:
            return
        names: set[str | int] = {relation.oid, relation.qualified_name}
        self._has_changed = self._has_changed or not names.isdisjoint(self._names)
        self._names |= names
        self._planned[relation] = plan
        self._enforce(relation)
        self._log.info("table_planned", relation=relation.qualified_name, lane=plan.lane.value, reason=plan.reason)

    def _enforce(self, relation: Relation) -> None:
        """Put a plan in force, less what trust takes from it."""
        trust = self._trust.get(relation.qualified_name)
        plan = _trusted(self._planned[relation], trust.level if trust else Level.TRUSTED)
        self.plans.known[relation] = plan
        current = self.plans.current.get(relation.oid)
        if current is not None and current.relation == relation:
            self.plans.current[relation.oid] = plan
        self._to_show.add(relation)

    def _forget_namesakes(self, relation: Relation) -> None:
        """Take a relation out whose name another one has now: it was dropped or renamed (trap T-71).

        If it was renamed the publisher announces it again before its next change.
        """
        current = self.plans.current
        for oid, plan in list(current.items()):
            if oid != relation.oid and plan.relation.qualified_name == relation.qualified_name:
                del current[oid]

    async def refresh(self, relations: Iterable[Relation]) -> None:
        """Read the catalogue again for relations whose statements went stale (traps T-48, F27).

        Raises:
            TargetRefused, TargetLost: as `resolve`.
        """
        for relation in relations:
            self._put(relation, await self._plan(relation))
        self._look_for_serial()

    async def _plan_ahead(self, relation: Relation) -> TablePlan | None:
        """Return the plan by what was read while the stream started, if that fits."""
        found = await self._ahead.take(relation.schema, relation.name)
        try:
            return self._match(relation, found) if found is not None else None
        except TargetRefused:
            return None  # the table may have been changed to fit since then

    async def _plan(self, relation: Relation) -> TablePlan:
        async with self._desk.session() as conn:
            found = await self._facts(conn, relation)
            try:
                await facts.check_table_access(conn, found)
            except TargetRefused:
                # Another table may have taken the name between the two looks, as online rewrites of a table do.
                found = await self._facts(conn, relation)
                await facts.check_table_access(conn, found)
        return self._match(relation, found)

    def _match(self, relation: Relation, found: TableFacts) -> TablePlan:
        setting = self._config.get(relation.qualified_name)
        parallel = setting.parallel if setting else "auto"
        plan = match.match(relation, found, parallel=parallel, is_relaxed=self._is_relaxed)
        if self._rules is None:
            return plan
        before_update, before_delete = self._rules.checks_origin(relation.qualified_name)
        if not (before_update or before_delete):
            return plan
        return replace(
            plan,
            own_origins=self._own_origins,
            checks_update_origin=before_update,
            checks_delete_origin=before_delete,
            reason=f"{plan.reason}; who wrote a row last is looked at before it is changed",
        )

    async def _facts(self, conn: Connection, relation: Relation) -> TableFacts:
        found = await facts.load_facts(conn, relation.schema, relation.name, role=self._role)
        if found is None:
            raise TargetRefused(
                f"target table {relation.qualified_name} does not exist",
                hint="create it as on the publisher and start again, or take it out of the publication",
            )
        return found

    def _look_for_serial(self) -> None:
        self.plans.may_be_serial = any(plan.lane is Lane.SERIAL for plan in self.plans.known.values())

    def plans_from(self, current: Mapping[int, TablePlan]) -> Plans:
        """Return plans for reading changes again from an earlier point, with what was refreshed since."""
        plans = Plans()
        known = plans.known = self.plans.known
        plans.refused = self.plans.refused
        plans.may_be_serial = self.plans.may_be_serial
        plans.current = {oid: known.get(plan.relation, plan) for oid, plan in current.items()}
        return plans

    def count_retry(self, relations: Collection[Relation], *, was_predictable: bool = False) -> None:
        """Count a batch that has to be repeated against the tables that may be the reason.

        Args:
            relations: of these tables.
            was_predictable: it was seen beforehand that no set is exact: that says nothing against prediction.
        """
        for relation in set(relations):
            trust = self._trust.setdefault(relation.qualified_name, Trust())
            if was_predictable:
                trust.retries += 1
                continue
            self.is_in_doubt.set()
            if trust.failed():
                self._trust_changed(relation, trust)
        self._to_show.update(relations)

    def count_applied(self, batch: Batch) -> None:
        """Count a batch that has committed: after a while a table that failed is tried again."""
        if not self._trust:
            return
        for relation in {changes.plan.relation for changes in batch.table_changes}:
            trust = self._trust.get(relation.qualified_name)
            if trust is not None and trust.applied():
                self._trust_changed(relation, trust)

    def _trust_changed(self, relation: Relation, trust: Trust) -> None:
        self._log.info("table_trust", relation=relation.qualified_name, value=trust.level.name.lower())
        for one in self._planned:
            if one.qualified_name == relation.qualified_name:
                self._enforce(one)

    def take_rows(self) -> list[TableRow]:
        """Return what changed since the last call, for the state schema."""
        shown = [relation for relation in self._to_show if relation in self.plans.known]
        rows = {relation.qualified_name: self._row(self.plans.known[relation]) for relation in shown}
        self._to_show.clear()
        return list(rows.values())

    def _row(self, plan: TablePlan) -> TableRow:
        relation = plan.relation
        trust = self._trust.get(relation.qualified_name)
        return TableRow(
            schema_name=relation.schema,
            table_name=relation.name,
            lane=plan.lane.value,
            is_table_exclusive=plan.is_table_exclusive,
            reason=plan.reason,
            key_columns=tuple([plan.columns[position].name for position in plan.key_positions]),
            retries=trust.retries if trust else 0,
        )


def _trusted(plan: TablePlan, level: Level) -> TablePlan:
    """Return what is left of a plan at a level of trust."""
    if level is Level.TRUSTED:
        return plan
    if level is Level.ALONE:
        return replace(plan, is_table_exclusive=True, reason=f"one batch at a time for now, {_OFTEN}; {plan.reason}")
    lane = Lane.ROW if plan.lane is Lane.SET else plan.lane
    reason = f"row by row, one batch at a time for now, {_OFTEN}; {plan.reason}"
    return replace(plan, lane=lane, is_table_exclusive=True, reason=reason)


_OFTEN = "because its batches had to be repeated often"
