"""The plan of every announced relation: read from the target when it is announced, and again when statements go stale.

The hot path never waits here: a relation is announced once a stream, and again after a schema change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parapply.errors import TargetRefused
from parapply.logs import get_logger
from parapply.plan.plans import Plans
from parapply.plan.table import Lane
from parapply.target import facts, match
from parapply.target.state import TableRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from parapply.config import TableConfig
    from parapply.model import Relation
    from parapply.plan.batch import Batch
    from parapply.plan.table import TableFacts, TablePlan
    from parapply.runtime.desk import Desk
    from parapply.target.settings import Connection


class Tables:
    """Plans by relation. Written by intake (`resolve`) and by a worker at the head (`refresh`), read by both."""

    def __init__(self, desk: Desk, role: str, config: Mapping[str, TableConfig]) -> None:
        """Start with nothing announced.

        Args:
            desk: sessions for reading the catalogue.
            role: session_replication_role of the workers.
            config: what the configuration says of single tables, by schema.table.
        """
        #: In force where intake reads. Batches and retries keep their own view of `current`.
        self.plans = Plans()
        self._desk = desk
        self._role = role
        self._config = config
        self._retries: dict[str, int] = {}
        self._to_show: set[Relation] = set()
        self._log = get_logger()

    async def resolve(self, relations: Iterable[Relation]) -> None:
        """Find the target table of each announced relation.

        A missing table, column or privilege is kept in `plans.refused` until a change needs it.

        Raises:
            TargetLost: the connection ended.
        """
        for relation in relations:
            known = self.plans.known
            self.plans.refused.pop(relation, None)
            try:
                plan = await self._plan(relation)
            except TargetRefused as error:
                self.plans.refused[relation] = error
                self._forget_namesakes(relation)
                continue
            # An equal plan stays the same object: statements and open segments go on.
            if known.get(relation) != plan:
                known[relation] = plan
                self._to_show.add(relation)
                self._log.info(
                    "table_planned", relation=relation.qualified_name, lane=plan.lane.value, reason=plan.reason
                )
            self._forget_namesakes(relation)
        self._look_for_serial()

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
            plan = await self._plan(relation)
            self.plans.known[relation] = plan
            current = self.plans.current.get(relation.oid)
            if current is not None and current.relation == relation:
                self.plans.current[relation.oid] = plan
            self._to_show.add(relation)
        self._look_for_serial()

    async def _plan(self, relation: Relation) -> TablePlan:
        async with self._desk.session() as conn:
            found = await self._facts(conn, relation)
            try:
                await facts.check_table_access(conn, found)
            except TargetRefused:
                # Another table may have taken the name between the two looks, as online rewrites of a table do.
                found = await self._facts(conn, relation)
                await facts.check_table_access(conn, found)
        setting = self._config.get(relation.qualified_name)
        return match.match(relation, found, parallel=setting.parallel if setting else "auto")

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

    def count_retry(self, batch: Batch) -> None:
        """Count a batch that had to be repeated for each of its tables."""
        for changes in batch.table_changes:
            relation = changes.plan.relation
            self._retries[relation.qualified_name] = self._retries.get(relation.qualified_name, 0) + 1
            self._to_show.add(relation)

    def take_rows(self) -> list[TableRow]:
        """Return what changed since the last call, for the state schema."""
        rows = {relation.qualified_name: self._row(self.plans.known[relation]) for relation in self._to_show}
        self._to_show.clear()
        return list(rows.values())

    def _row(self, plan: TablePlan) -> TableRow:
        relation = plan.relation
        return TableRow(
            schema_name=relation.schema,
            table_name=relation.name,
            lane=plan.lane.value,
            is_table_exclusive=plan.is_table_exclusive,
            reason=plan.reason,
            key_columns=tuple([plan.columns[position].name for position in plan.key_positions]),
            retries=self._retries.get(relation.qualified_name, 0),
        )
