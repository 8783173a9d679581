"""Columns with one value in all rows of a source: what is refused, and keys and dependencies without them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from parapply.errors import TargetRefused
from parapply.plan.table import Equality, Lane
from parapply.target.catalogue.match import match
from tests.unit.plans import column, foreign_key, relation, sent, table, unique

TENANT = column("tenant", default_code=("pick_tenant()",))
FACTS = table([TENANT, column("id"), column("v", "text")], key=["tenant", "id"])
SENT = relation(sent("id", is_key=True), sent("v", "text"))


def test_the_key_is_what_is_left_of_it() -> None:
    """Rows are found by the columns that are sent, in sets; the constant's default does not act."""
    plan = match(SENT, FACTS, constants={"tenant": "7"})
    assert (plan.lane, plan.key_positions, plan.can_update, plan.is_table_exclusive) == (Lane.SET, (0,), True, False)
    assert [one.pair for one in plan.constants] == [("tenant", "7")]
    assert plan.reason.endswith("only rows with tenant = 7")


def test_sources_never_meet() -> None:
    """Tables and trees have other numbers for other values, above every OID, and the same for the same ones."""
    plans = [match(SENT, FACTS, constants={"tenant": text}) for text in ("7", "8", "7")]
    assert plans[0].rows_oid == plans[2].rows_oid
    assert len({number for plan in plans for number in (plan.rows_oid, plan.tree_oid)}) == 2
    assert all(1 << 32 < plan.rows_oid < 1 << 64 for plan in plans)
    plain = match(SENT, replace(FACTS, key_columns=("id",)))
    assert (plain.rows_oid, plain.tree_oid) == (FACTS.oid, FACTS.root_oid)


@pytest.mark.parametrize(
    ("type_", "text", "words"),
    [
        ("int2", "-32768", ""), ("int2", "32768", "no integer as large"), ("int4", "07", "an integer"),
        ("int4", "-0", "an integer"), ("int8", "9223372036854775807", ""), ("int8", " 7", "an integer"),
        ("text", "", ""), ("text", "it's", ""), ("uuid", "00000000-0000-0000-0000-00000000000A", "prints a uuid"),
        ("uuid", "00000000-0000-0000-0000-00000000000a", ""), ("numeric", "7", "of no type"),
        ("date", "7", "of no type"),
    ],
)  # fmt: skip
def test_values_have_one_text(type_: str, text: str, words: str) -> None:
    """Two sources are distinguished by texts, so equal values must not have two."""
    facts = table([column("tenant", type_), column("id"), column("v", "text")], key=["tenant", "id"])
    if not words:
        assert match(SENT, facts, constants={"tenant": text}).constants
        return
    with pytest.raises(TargetRefused, match=words):
        match(SENT, facts, constants={"tenant": text})


def test_a_text_must_fit_its_length() -> None:
    """The modifier of a varchar is its length and four."""
    facts = table(
        [column("tenant", "varchar", type_modifier=7), column("id"), column("v", "text")], key=["tenant", "id"]
    )
    assert match(SENT, facts, constants={"tenant": "abc"}).constants
    with pytest.raises(TargetRefused, match="no text as long"):
        match(SENT, facts, constants={"tenant": "abcd"})


@pytest.mark.parametrize(
    ("index", "is_refused"),
    [
        (unique("u", "v"), True), (unique("u", "tenant", "v"), False), (unique("u"), True),
        (unique("u", named=("tenant",)), False), (unique("u", "gid"), False), (unique("u", "gid", "v"), True),
    ],
)  # fmt: skip
def test_every_unique_index_holds_the_constants(index: object, is_refused: bool) -> None:  # noqa: FBT001  a case
    """An index without them would let a source meet another one's rows; but for columns that the target fills."""
    facts = replace(FACTS, columns=(*FACTS.columns, column("gid")), unique=(index,))
    if is_refused:
        with pytest.raises(TargetRefused, match='unique index "u" does not hold "tenant"'):
            match(SENT, facts, constants={"tenant": "7"})
        return
    plan = match(SENT, facts, constants={"tenant": "7"})
    assert all(plan.columns[position].name != "tenant" for key in plan.unique_keys for position in key.positions)


def test_a_key_without_the_constant_is_refused() -> None:
    """So is a column that is also sent, or that the target makes."""
    alike = column("tenant", "text", equality=Equality.UNKNOWN)
    refused = {
        'the key \\("id"\\) does not hold': replace(FACTS, key_columns=("id",)),
        "the target makes them": replace(FACTS, columns=(replace(TENANT, is_generated=True), *FACTS.columns[1:])),
        "different texts for equal": replace(FACTS, columns=(alike, *FACTS.columns[1:])),
    }  # fmt: skip
    for words, facts in refused.items():
        with pytest.raises(TargetRefused, match=words):
            match(SENT, facts, constants={"tenant": "7"})
    with pytest.raises(TargetRefused, match="is also published"):
        match(relation(sent("id", is_key=True), sent("tenant")), FACTS, constants={"tenant": "7"})


def test_foreign_keys_lead_to_rows_of_the_same_source() -> None:
    """References are compared without the constants, and with parents that may have the same ones."""
    key = foreign_key("f", "tenant", "id", parent_oid=1)
    child = match(SENT, replace(FACTS, foreign_keys=(key,)), constants={"tenant": "7"})
    [foreign] = child.foreign_keys
    assert (foreign.positions, foreign.parent_columns, foreign.constants) == ((0,), ("id",), (("tenant", "7"),))
    assert foreign.leads_to(match(SENT, FACTS, constants={"tenant": "7"}))
    assert not foreign.leads_to(match(SENT, FACTS, constants={"tenant": "8"}))
    assert foreign.leads_to(match(SENT, replace(FACTS, key_columns=("id",))))
