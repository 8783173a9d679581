"""The plan of every announced relation: read from the target when it is announced, and again when it may be stale.

The hot path never waits here: a relation is announced once a stream, and again after a schema change. Changes on the
target alone are noticed by `watch.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from msgspec.structs import replace

from parapply.config_mapping import are_apart
from parapply.errors import TargetRefused
from parapply.logs import get_logger
from parapply.plan.downgrade import Downgrades, Level
from parapply.plan.table import Lane, Plans, TableFacts
from parapply.target.catalogue import expressions, facts, match
from parapply.target.state.slots import TableRow

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from parapply.config import TableConfig
    from parapply.config_mapping import MappingConfig
    from parapply.conflict.policies import Rules
    from parapply.model import Relation
    from parapply.plan.batch import Batch
    from parapply.plan.table import Replacement, TablePlan
    from parapply.runtime.tables.control_pool import ControlPool
    from parapply.runtime.tables.prefetch import AheadFacts, CataloguePrefetch
    from parapply.target.catalogue.facts import Ask
    from parapply.target.session.settings import Connection
    from parapply.target.sql.commands import Command


class TablePlans:
    """Plans by relation. Written by intake (`resolve`), by workers and by the watch, read by all of them."""

    def __init__(  # noqa: PLR0913  one place makes it
        self,
        control_pool: ControlPool,
        ahead: CataloguePrefetch,
        role: str,
        config: Mapping[str, TableConfig],
        *,
        is_relaxed: bool = False,
        rules: Rules | None = None,
        own_origins: str = "",
        privileges: Sequence[str] = facts.ROW_PRIVILEGES,
        mapping: MappingConfig | None = None,
        apply_as: str = "owner",
    ) -> None:
        """Start with nothing announced.

        Args:
            control_pool: sessions for reading the catalogue.
            ahead: facts read from it while the stream started.
            role: session_replication_role of the workers.
            config: settings of single tables, by schema.table.
            is_relaxed: independent transactions commit in any order.
            rules: policies of conflicts; they may want rows read before they are changed.
            own_origins: how the names of the slot's replication origins begin.
            privileges: that every table must give.
            mapping: which tables have another name on the target; None: none.
            apply_as: as of `match`.
        """
        #: In force where intake reads. Batches and retries keep their own view of `current`.
        self.plans = Plans()
        self._control_pool = control_pool
        self._ahead = ahead
        #: session_replication_role of the workers.
        self.role = role
        self._config = config
        self._is_relaxed = is_relaxed
        self._rules = rules
        self._own_origins = own_origins
        self._privileges = privileges
        #: True if every table lets the workers lock a row.
        self.may_lock_rows = "UPDATE" in privileges
        self._mapping = mapping
        self._apply_as = apply_as
        #: Names on the target by names on the publisher, as schema.table, of tables where they differ.
        self.target_names: dict[str, str] = {}
        #: With a mapping, names on the publisher with their constants, by names on the target, of what is applied.
        self._sources: dict[tuple[str, str], dict[tuple[str, str], Mapping[str, str]]] = {}
        #: Names on the publisher by which to look for tables that a transaction still calls by an earlier one.
        self._renamed: dict[Relation, tuple[str, str]] = {}
        #: Lack columns that were to be left out, which have no other name there.
        self._lacking: set[Relation] = set()
        #: Whose changes under their own names must not be applied, and why.
        self._withheld: dict[Relation, TargetRefused] = {}
        #: Plans by the catalogue alone; `plans` holds them downgraded where a table is not trusted.
        self._planned: dict[Relation, TablePlan] = {}
        #: A plan and the facts that it was made of, by what tables of one shape share; see `_of_shape`.
        self._shapes: dict[tuple[int, int, str], tuple[TablePlan, TableFacts]] = {}
        #: Names and publisher's OIDs of all relations ever planned.
        self._names: set[tuple[str, str] | int] = set()
        #: Publisher's OIDs of all relations ever planned, by name.
        self._oids: dict[tuple[str, str], set[int]] = {}
        self._serial: set[Relation] = set()
        #: True once a planned table runs code: that may have changed settings of a worker's session for good.
        self.has_code = False
        #: Fingerprint that a plan was made with, where it is known; the watch takes it from here.
        self._fingerprints: dict[Relation, tuple[int, str]] = {}
        #: Records of the tables whose batches had to be repeated; nearly always empty, and then nothing is counted.
        self.trust: dict[tuple[str, str], Downgrades] = {}
        #: True if a plan has changed since the batcher last cleared it: later batches must not run alongside earlier
        #: ones. The facts of two plans cannot be compared, because an index may be in one of them only.
        self.has_changed = False
        #: Set when a batch failed in a way that a change of the tables may explain; the watch then checks at once.
        self.is_in_doubt = asyncio.Event()
        self._to_show: set[Relation] = set()
        #: Schema and table of tables whose changes are left out until they are copied; for people.
        self._waiting: frozenset[tuple[str, str]] = frozenset()
        #: Of tables whose rows the configuration leaves out.
        self._schema_only: frozenset[tuple[str, str]] = frozenset()
        self._log = get_logger()

    def in_force(self, *, but: Collection[Relation] = ()) -> dict[Relation, int]:
        """Return the relations in force where intake reads, except some, each with the OID of its target table."""
        # Asked every few seconds: with thousands of tables a second pass over them is a large part of an idle daemon.
        return {plan.relation: plan.facts.oid for plan in self.plans.current.values() if plan.relation not in but}

    def is_in_force(self, relation: Relation) -> bool:
        """Return whether intake reads changes of a relation by the plan of just this announcement, or refuses them."""
        if relation in self._withheld:
            return True
        current = self.plans.current.get(relation.oid)
        return current is not None and current.relation == relation and relation not in self.plans.refused

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
            # Only now, so that a worker following a transaction in progress always finds it planned or refused.
            self.plans.refused.pop(relation, None)
            self._put(relation, plan)
            self._forget_namesakes(relation)

    async def apply_as(self, relation: Relation, name: tuple[str, str]) -> None:
        """Apply changes of a relation to the table that has another name of the publisher's, and plan it again.

        Raises:
            TargetLost: the connection ended.
        """
        self._renamed[relation] = name
        await self.resolve([relation])

    def is_withheld(self, relation: Relation) -> bool:
        """Return whether changes of a relation are refused."""
        return relation in self._withheld

    async def withhold(self, relation: Relation, error: TargetRefused | None) -> None:
        """Refuse changes of a relation, or no longer: then it is planned again.

        Raises:
            TargetLost: the connection ended.
        """
        was_withheld = self._withheld.pop(relation, None) is not None
        if error is not None:
            self._withheld[relation] = self.plans.refused[relation] = error
            self._forget_namesakes(relation)
        elif was_withheld:
            await self.resolve([relation])

    async def apply_lacking(self, relation: Relation, *, may_lack: bool) -> None:
        """Apply a relation that lacks columns which were to be left out, or refuse it, and plan it again if need be.

        Raises:
            TargetLost: the connection ended.
        """
        if may_lack == (relation in self._lacking) or not relation.lacks:
            return
        if may_lack:
            self._lacking.add(relation)
        else:
            self._lacking.remove(relation)
        await self.resolve([relation])

    async def read_ahead(self, relations: Iterable[Relation]) -> None:
        """Wait for relations that are being read ahead; not for long where that takes long."""
        for relation in relations:
            await self._ahead.make_ready(*self._target_of(relation))

    def resolve_new(self, relations: Sequence[Relation]) -> bool:
        """Find the target tables of relations never announced before, if all of them were read ahead and still hold.

        Nothing that is in force changes, so a batch that is open may go on.

        Returns:
            True if it did so; if not, nothing has changed, and `resolve` is to be called.
        """
        plans: dict[Relation, TablePlan] = {}
        names: set[tuple[str, str] | int] = set()
        for relation in relations:
            both: set[tuple[str, str] | int] = {relation.oid, relation.full_name}
            plan = self._match_ahead(relation, self._ahead.ready(*self._target_of(relation)))
            if plan is None or not (both.isdisjoint(self._names) and both.isdisjoint(names)):
                return False
            names |= both
            plans[relation] = plan
        for relation, plan in plans.items():
            self._ahead.forget(*self._target_of(relation))
            self.plans.refused.pop(relation, None)
            self._put(relation, plan)
        return True

    async def resolve_streamed(self, relations: Iterable[Relation]) -> None:
        """Find the target tables of relations announced inside a transaction in progress; this puts nothing in force.

        The plans in force for others change when it commits, if it does (trap T-52).

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

    async def resolve_inside(self, relations: Iterable[Relation], ask: Ask) -> None:
        """Find the target tables of relations as an open target transaction has them; this puts nothing in force.

        For commands of the publisher that this transaction has run: nothing else is in flight, and if it is rolled back
        everything is read again before it is used.

        Args:
            relations: announced after a command, or used after it.
            ask: queries the session of that transaction.

        Raises:
            StatementFailed, TargetLost: as `ask`.
        """
        for relation in relations:
            try:
                found = await facts.load_facts_inside(
                    ask, *self._target_of(relation), role=self.role, privileges=self._privileges
                )
                plan = self._match(relation, self._there(relation, found))
            except TargetRefused as error:
                self.plans.refused[relation] = error
                continue
            self.plans.refused.pop(relation, None)
            self._put(relation, plan)

    async def read_all_again(self) -> None:
        """Read the catalogue again for every relation in force: commands of the publisher have changed the target.

        A relation that can no longer be applied is put out of force, because its next change is announced first.

        Raises:
            TargetLost: the connection ended.
        """
        self._ahead.forget_all()
        relations = [plan.relation for plan in self.plans.current.values()]
        for at in range(0, len(relations), _GROUP):
            for relation, error in (await self.reread(relations[at : at + _GROUP])).items():
                self.plans.current.pop(relation.oid, None)
                self.plans.gone[relation.oid] = error

    def _put(self, relation: Relation, plan: TablePlan) -> None:
        """Keep a plan; an equal one stays the same object, so that statements and open segments stay valid."""
        if self._planned.get(relation) == plan:
            return
        names: set[tuple[str, str] | int] = {relation.oid, relation.full_name}
        self.has_changed = self.has_changed or not names.isdisjoint(self._names)
        self._names |= names
        self._oids.setdefault(relation.full_name, set()).add(relation.oid)
        self._planned[relation] = plan
        self.has_code = self.has_code or plan.runs_code
        self._enforce(relation)
        self._log.info("table_planned", relation=relation.qualified_name, lane=plan.lane.value, reason=plan.reason)

    def _enforce(self, relation: Relation) -> None:
        """Put a plan in force, downgraded if its table is not trusted."""
        trust = self.trust.get(relation.full_name)
        plan = _trusted(self._planned[relation], trust) if trust else self._planned[relation]
        self.plans.known[relation] = plan
        if plan.lane is Lane.SERIAL:
            self._serial.add(relation)
        else:
            self._serial.discard(relation)
        self.plans.may_be_serial = bool(self._serial)
        current = self.plans.current.get(relation.oid)
        if current is not None and current.relation == relation:
            self.plans.current[relation.oid] = plan
        self._to_show.add(relation)

    def announced(self, relations: Iterable[Relation]) -> None:
        """Take out of force whatever relations, now in force, have taken the name from."""
        for relation in {relation.full_name: relation for relation in relations}.values():
            self._forget_namesakes(relation)

    def _forget_namesakes(self, relation: Relation) -> None:
        """Take a relation out whose name another one has now: it was dropped or renamed (trap T-71).

        If it was renamed the publisher announces it again before its next change.
        """
        current = self.plans.current
        for oid in self._oids.get(relation.full_name, set()) - {relation.oid}:
            if oid in current and current[oid].relation.full_name == relation.full_name:
                del current[oid]

    def take_fingerprints(self) -> dict[Relation, tuple[int, str]]:
        """Return OID and fingerprint of tables planned since the last call by facts that are not older than it."""
        taken, self._fingerprints = self._fingerprints, {}
        return taken

    async def refresh(self, relations: Iterable[Relation]) -> None:
        """Read the catalogue again for relations whose statements went stale (traps T-48, F27).

        Raises:
            TargetRefused, TargetLost: as `resolve`.
        """
        for relation in relations:
            self._put(relation, await self._plan(relation))

    async def reread(self, relations: Sequence[Relation]) -> dict[Relation, TargetRefused]:
        """Read the catalogue again for many relations at once; return which of them cannot be applied, and why.

        Raises:
            TargetLost: the connection ended.
        """
        async with self._control_pool.session() as conn:
            names = {relation: self._target_of(relation) for relation in relations}
            many = await facts.load_many(conn, list(names.values()), role=self.role)
            tables = {name: found for name, found in many.items() if isinstance(found, TableFacts)}
            denied = await facts.access_problems(conn, list(tables.values()), self._privileges)
        refused = {}
        for relation in relations:
            found = tables.get(names[relation])
            try:
                if found is None or names[relation] in denied or self._replaced_of(relation):
                    await self.refresh([relation])  # reports the fault, or finds that it is gone; or judges expressions
                else:
                    self._put(relation, self._match(relation, found))
            except TargetRefused as error:
                refused[relation] = error
        return refused

    async def refresh_written(self, commands: Iterable[Command]) -> None:
        """Read the catalogue again for the tables of commands, now, and soon for all others.

        Raises:
            TargetRefused, TargetLost: as `resolve`.
        """
        self.is_in_doubt.set()
        await self.refresh({plan.relation for one in commands for plan in one.plans})

    async def _plan_ahead(self, relation: Relation) -> TablePlan | None:
        """Return the plan by the facts read while the stream started, if they fit."""
        return self._match_ahead(relation, await self._ahead.take(*self._target_of(relation)))

    def _match_ahead(self, relation: Relation, found: AheadFacts | None) -> TablePlan | None:
        # Expressions are judged by asking.
        if found is None or self._replaced_of(relation):
            return None
        try:
            plan = self._match(relation, found.facts)
        except TargetRefused:
            return None  # the table may have been changed to fit since then
        self._fingerprints[relation] = found.facts.oid, found.fingerprint
        return plan

    async def _plan(self, relation: Relation) -> TablePlan:
        async with self._control_pool.session() as conn:
            found = await self._facts(conn, relation)
            try:
                await facts.check_table_access(conn, found, self._privileges)
            except TargetRefused:
                # Another table may have taken the name between the two queries, as online rewrites of a table do.
                found = await self._facts(conn, relation)
                await facts.check_table_access(conn, found, self._privileges)
            texts = self._replaced_of(relation)
            judged = await expressions.judge(conn, relation, (found.schema, found.name), texts) if texts else {}
        return self._match(relation, found, judged)

    def _replaced_of(self, relation: Relation) -> Mapping[str, str]:
        return {} if self._mapping is None else self._mapping.replaced_of(self._name(relation))

    def _match(
        self, relation: Relation, found: TableFacts, judged: Mapping[str, Replacement] | None = None
    ) -> TablePlan:
        if relation in self._withheld:
            raise self._withheld[relation]
        self._check_alone(relation)
        judged = judged or {}
        if judged.keys() != self._replaced_of(relation).keys():
            raise TargetRefused(f"`replace` of {relation.qualified_name} cannot be judged inside a transaction")
        setting = self._config.get(relation.qualified_name)
        constants = {} if self._mapping is None else self._mapping.constants_of(self._name(relation))
        omitted = () if self._mapping is None else self._mapping.omitted_of(self._name(relation))
        if relation in self._lacking:
            omitted = tuple([name for name in omitted if name not in relation.lacks])
        if setting or constants or omitted or judged:
            plan = match.match(
                relation, found, parallel=setting.parallel if setting else "auto", is_relaxed=self._is_relaxed,
                apply_as=self._apply_as, constants=constants, omitted=omitted, replacements=judged,
            )  # fmt: skip
        else:
            plan = self._of_shape(relation, found)
        if (found.schema, found.name) != relation.full_name:
            plan = replace(plan, reason=f"{plan.reason}; on the target {found.schema}.{found.name}")
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

    def _of_shape(self, relation: Relation, found: TableFacts) -> TablePlan:
        """Return the plan of a table without settings: a copy of an earlier one's that differs by names and OIDs.

        Raises:
            TargetRefused: as `match`.
        """
        # By identity: columns that are read once for many tables are one object, which an entry keeps alive.
        key = id(relation.columns), id(found.columns), relation.replica_identity
        if known := self._shapes.get(key):
            plan, like = known
            if _renamed(like, found) == found:
                return replace(plan, relation=relation, facts=_renamed(plan.facts, found))
        plan = match.match(relation, found, is_relaxed=self._is_relaxed, apply_as=self._apply_as)
        if not plan.refusal:  # which names the table
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            self._shapes[key] = plan, found
        return plan

    def _name(self, relation: Relation) -> tuple[str, str]:
        return self._renamed.get(relation, relation.full_name)

    def _target_of(self, relation: Relation) -> tuple[str, str]:
        name = self._name(relation)
        return name if self._mapping is None else self._mapping.target_of(name)

    def _check_alone(self, relation: Relation) -> None:
        """Refuse a second publisher's table for the same rows, because their dependencies could not be seen."""
        if self._mapping is None:
            return
        name = self._target_of(relation)
        here = self._sources.setdefault(name, {})
        mine = here.setdefault(relation.full_name, self._mapping.constants_of(self._name(relation)))
        met = [other for other, its in here.items() if other != relation.full_name and not are_apart([mine, its])]
        if met:
            del here[relation.full_name]
            raise TargetRefused(
                f"{'.'.join(met[0])} and {relation.qualified_name} are both applied to target table {'.'.join(name)}",
                hint="correct [mapping], where `set` gives each its own values; after a rename on the publisher restart"
                " the daemon",
            )
        if name != relation.full_name:
            self.target_names[relation.qualified_name] = ".".join(name)

    async def _facts(self, conn: Connection, relation: Relation) -> TableFacts:
        found = await facts.load_facts(conn, *self._target_of(relation), role=self.role)
        return self._there(relation, found)

    def _there(self, relation: Relation, found: TableFacts | None) -> TableFacts:
        if found is not None:
            return found
        name = self._target_of(relation)
        published = "" if name == relation.full_name else f", to which {relation.qualified_name} is mapped,"
        raise TargetRefused(
            f"target table {'.'.join(name)}{published} does not exist",
            hint="create it as on the publisher and start again, or take it out of the publication",
        )

    def plans_from(self, current: Mapping[int, TablePlan]) -> Plans:
        """Return plans for reading changes again from an earlier point, with the plans refreshed since."""
        plans = Plans()
        known = plans.known = self.plans.known
        plans.refused, plans.gone = self.plans.refused, self.plans.gone
        plans.may_be_serial = self.plans.may_be_serial
        plans.current = {oid: known.get(plan.relation, plan) for oid, plan in current.items()}
        return plans

    def count_retry(self, relations: Collection[Relation], *, was_predictable: bool = False) -> None:
        """Count a batch that has to be repeated against the tables that may be the reason.

        Args:
            relations: of these tables.
            was_predictable: it was known beforehand that no set is exact, which says nothing against prediction.
        """
        for relation in set(relations):
            self.trust.setdefault(relation.full_name, Downgrades()).retries += 1
            if not was_predictable:
                self.is_in_doubt.set()
        self._to_show.update(relations)

    def distrust(self, relations: Collection[Relation], level: Level) -> None:
        """Count a batch that failed as planned against the tables that made it fail.

        Args:
            relations: of these tables.
            level: at which it would not have failed.
        """
        for relation in set(relations):
            trust = self.trust.setdefault(relation.full_name, Downgrades())
            if trust.failed(level):
                self._trust_changed(relation, trust)

    def count_applied(self, batch: Batch) -> None:
        """Count a batch that has committed: after a while a table that failed is tried again."""
        for relation in {changes.plan.relation for changes in batch.table_changes}:
            trust = self.trust.get(relation.full_name)
            if trust is not None and trust.applied():
                self._trust_changed(relation, trust)

    def _trust_changed(self, relation: Relation, trust: Downgrades) -> None:
        self._log.info("table_trust", relation=relation.qualified_name, value=trust.level.name.lower())
        for one in self._planned:
            if one.full_name == relation.full_name:
                self._enforce(one)

    def show_waiting(self, names: frozenset[tuple[str, str]], schema_only: frozenset[tuple[str, str]]) -> None:
        """Show which tables are not applied until they are copied, by schema and name; and those that never are."""
        changed = (names ^ self._waiting) | (schema_only ^ self._schema_only)
        self._waiting, self._schema_only = names, schema_only
        if changed:
            self._to_show |= {one for one in self.plans.known if one.full_name in changed}

    def take_rows(self) -> list[TableRow]:
        """Return rows of the plans changed since the last call, for the state schema."""
        shown = [relation for relation in self._to_show if relation in self.plans.known]
        rows = {relation.full_name: self._row(self.plans.known[relation]) for relation in shown}
        self._to_show.clear()
        return list(rows.values())

    def _row(self, plan: TablePlan) -> TableRow:
        relation = plan.relation
        trust = self.trust.get(relation.full_name)
        is_waiting, is_left_out = relation.full_name in self._waiting, relation.full_name in self._schema_only
        reason = (
            f"its changes are left out until `parapply refresh`; then: {plan.reason}" if is_waiting else plan.reason
        )
        return TableRow(
            schema_name=relation.schema,
            table_name=relation.name,
            lane=_SCHEMA_ONLY if is_left_out else _WAITING if is_waiting else plan.lane.value,
            is_table_exclusive=plan.is_table_exclusive,
            reason="mapping.schema_only leaves its rows out" if is_left_out else reason,
            key_columns=tuple([plan.columns[position].name for position in plan.key_positions]),
            retries=trust.retries if trust else 0,
        )


def _renamed(facts: TableFacts, other: TableFacts) -> TableFacts:
    """Return facts with the names and OIDs of another table."""
    return replace(facts, oid=other.oid, schema=other.schema, name=other.name, root_oid=other.root_oid)


def _trusted(plan: TablePlan, trust: Downgrades) -> TablePlan:
    """Return a plan downgraded as far as its table is distrusted."""
    if trust.level is Level.TRUSTED:
        return plan
    why = f"one batch at a time for now, for {trust.penalty} batches, {_OFTEN}; {plan.reason}"
    if trust.level is Level.ALONE:
        return replace(plan, is_table_exclusive=True, reason=why)
    lane = Lane.ROW if plan.lane is Lane.SET else plan.lane
    reason = f"row by row, {why}"
    return replace(plan, lane=lane, is_table_exclusive=True, reason=reason)


#: Relations read again at once.
_GROUP = 250
#: Shapes of which a plan is kept.
_MOST_SHAPES = 256
#: Shown as the lane of a table that is not applied yet, or never.
_WAITING = "waiting"
_SCHEMA_ONLY = "schema only"
_OFTEN = "because its batches had to be repeated often"
