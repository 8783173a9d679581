"""Announced relations that the target cannot take: no error before a change of them comes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from parapply.errors import ProtocolError, TargetRefused
from parapply.plan.batch import Batch
from parapply.plan.steps import check_plans, is_serial, ordered_changes
from parapply.plan.table import Plans
from parapply.wire.assembler import Assembler
from tests import build
from tests.unit.changes_model import PLAIN

ROW = build.row(*[build.text(value) for value in (b"1", b"a", b"b")])


def test_a_refused_relation_is_an_error_at_its_first_change() -> None:
    """A partition is announced beside its root and need not exist; a change of it says why it cannot be applied."""
    plans = Plans()
    plan = PLAIN.plan(0)
    leaf = replace(plan.relation, oid=plan.relation.oid + 1, name="leaf")
    plans.known[plan.relation] = plan
    plans.refused[leaf] = TargetRefused("target table leaf does not exist")
    plans.announce(plan.relation)
    plans.announce(leaf)
    frames = [
        build.xlog_data(payload)
        for oid in (plan.relation.oid, leaf.oid, leaf.oid + 1)
        for payload in (build.begin(), build.insert(ROW, oid=oid), build.commit())
    ]
    fine, refused, unknown = Assembler(1 << 30).push(frames)
    check_plans(fine, plans)
    batch = Batch(1)
    batch.add(fine, plans)
    assert batch.n_changes == 1
    with pytest.raises(TargetRefused, match="leaf"):
        check_plans(refused, plans)
    with pytest.raises(TargetRefused, match="leaf"):
        is_serial(refused, plans)
    with pytest.raises(ProtocolError, match="never announced"):
        check_plans(unknown, plans)


def test_a_refused_relation_takes_the_place_of_the_one_before() -> None:
    """An OID announced again as a refused relation is no longer applied as it was, nor in views of the plans."""
    plans = Plans()
    plan = PLAIN.plan(0)
    renamed = replace(plan.relation, name="renamed")
    plans.known[plan.relation] = plan
    plans.announce(plan.relation)
    plans.refused[renamed] = TargetRefused("target table renamed does not exist")
    ahead = plans.view()
    ahead.announce(renamed)
    assert plan.relation.oid not in ahead.current
    assert plans.current == {plan.relation.oid: plan}
    frames = [build.xlog_data(one) for one in (build.begin(), build.insert(ROW, oid=plan.relation.oid), build.commit())]
    (transaction,) = Assembler(1 << 30).push(frames)
    assert len(ordered_changes(transaction, plans.view())) == 1
