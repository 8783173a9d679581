"""The history's record of a change can be read back."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from parapply.conflict.changes import RESTARTS_IDENTITY, key_of_truncate, listed_tables
from parapply.plan.steps import TruncateStep
from tests.unit.changes_model import PLAIN

_NAMES = st.text(alphabet='a".,  \n', min_size=1, max_size=4)


@given(st.lists(st.tuples(_NAMES, _NAMES), min_size=1, max_size=3), st.booleans())
def test_the_tables_of_a_truncate_are_those_that_it_emptied(names: list[tuple[str, str]], restarts: bool) -> None:  # noqa: FBT001
    """Whatever characters names have; a plain name is kept as it is."""
    plan = PLAIN.plan(0)
    relations = [msgspec.structs.replace(plan.relation, schema=schema, name=name) for schema, name in names]
    plans = tuple([msgspec.structs.replace(plan, relation=relation) for relation in relations])
    key = key_of_truncate(TruncateStep(plans, restarts))
    assert listed_tables(key) == names
    assert (key.get(RESTARTS_IDENTITY) == "true") == restarts
    assert listed_tables({"tables": "public.t, s.u"}) == [("public", "t"), ("s", "u")]
