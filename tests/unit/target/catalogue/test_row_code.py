"""Bodies of row triggers: which of them are known to see nothing but their row, and which are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from parapply.target.catalogue.row_code import row_trigger

if TYPE_CHECKING:
    from parapply.plan.table import RowTrigger


def _read(body: str, *, fires_on_all: bool = True) -> RowTrigger | None:
    return row_trigger("trigger t", "1", body, fires_on_all=fires_on_all)


def _columns(body: str) -> tuple[tuple[str, ...], tuple[str, ...], bool] | None:
    found = _read(body)
    return None if found is None else (found.reads, found.writes, found.is_function_of_new)


@pytest.mark.parametrize(
    ("body", "reads", "writes"),
    [
        ("BEGIN NEW.total := 2 * NEW.price; RETURN NEW; END", "price", "total"),
        ("\nbegin\n  new.Total = new.PRICE;  -- the same\n  RETURN new;\nend;\n", "price", "total"),
        ("BEGIN NEW.\"To;tal\" := NEW.a || ' it''s; '; RETURN NEW; END", "a", "To;tal"),
        ("BEGIN NEW.a := lower(trim(NEW.b)); NEW.c := coalesce(NEW.b, 'x'); NULL; RETURN NEW; END;", "b", "a c"),
        ("BEGIN NEW.a := CASE WHEN NEW.b IS DISTINCT FROM 1.5 THEN -1 ELSE (NEW.c) END; RETURN NEW; END", "b c", "a"),
        ("BEGIN NEW.a := NEW.b IN (1, 2) AND NOT (NEW.c BETWEEN 1 AND 2); RETURN NEW; END", "b c", "a"),
        ("BEGIN RETURN NEW; END", "", ""),
    ],
)  # fmt: skip
def test_columns_computed_from_others_are_known(body: str, reads: str, writes: str) -> None:
    """Assignments of expressions over the new row, with PostgreSQL's functions and operators, are a function of it."""
    assert _columns(body) == (tuple(reads.split()), tuple(writes.split()), True)


@pytest.mark.parametrize(
    "body",
    [
        "BEGIN NEW.n := OLD.n + 1; RETURN NEW; END",
        "BEGIN NEW.n := TG_OP; RETURN NEW; END",
        "BEGIN IF NEW.v > 1 THEN NEW.n := 1; END IF; RETURN NEW; END",
        "BEGIN IF NEW.v = 1 THEN NEW.n := 1; ELSIF NEW.v = 2 THEN RETURN NEW; ELSE NULL; END IF; RETURN NEW; END",
        "BEGIN RETURN NEW; NEW.n := NEW.v; RETURN NEW; END",
    ],
)
def test_earlier_values_and_branches_need_each_change(body: str) -> None:
    """A body that reads the old row, the operation, or assigns in some cases only, is known but sees each change."""
    found = _columns(body)
    assert found is not None
    assert found[2] is False


def test_a_trigger_that_does_not_fire_on_all_needs_each_change() -> None:
    """An insert that a later update changes is one insert in a set: a trigger for one of them would not see it so."""
    found = _read("BEGIN NEW.a := NEW.b; RETURN NEW; END", fires_on_all=False)
    assert found is not None
    assert not found.is_function_of_new


@pytest.mark.parametrize(
    "text",
    [
        "NEW.a := now()",
        "NEW.a := NEW.a + random()",
        "NEW.a := nextval('s')",
        "NEW.a := current_timestamp",
        "NEW.a := public.lower(NEW.b)",
        "NEW.a := new.lower(NEW.b)",
        "NEW.a := NEW.b (1)",
        'NEW.a := "lower"(NEW.b)',
        "NEW.a := lower",
        "NEW.a := NEW.b FROM NEW.c",
        "NEW.a := DISTINCT NEW.b",
        "NEW.a := (SELECT 1)",
        "NEW.a := 1, 2",
        "NEW.a := NEW.b) + (1",
        "NEW.a := (NEW.b).c",
        "NEW.a := NEW.b.c",
        "NEW.a := NEW.b[1]",
        "NEW.a := NEW.*::text",
        "NEW.a := NEW::text",
        "NEW.a := NEW.b::date",
        "NEW.a := date 'now'",
        "NEW.a := E'\\''",
        "NEW.a := U&'x'",
        "NEW.a := $$x$$",
        "NEW.a := $1",
        "NEW.a := 1 +-- comment\n 2",
        "NEW.a := 1 /* c */",
        "NEW.a := 1 @@ 2",
        "NEW.a := NEW.b OPERATOR(public.+) 1",
        "NEW.a := tg_table_name",
        "NEW.a := lower(b := NEW.c)",
        "NEW.a := ",
        "NEW.a[1] := 1",
        "NEW := OLD",
        "OLD.a := 1",
        "v := 1",
        "PERFORM f()",
        "INSERT INTO log VALUES (1)",
        "RAISE 'no'",
        "IF NEW.a > 1 THEN RETURN NULL; END IF",
        "IF NEW.a > 1 THEN PERFORM f(); END IF",
        "FOR i IN 1..2 LOOP NEW.a := 1; END LOOP",
        "BEGIN NEW.a := 1; EXCEPTION WHEN others THEN NULL; END",
        "RETURN OLD",
        "RETURN NULL",
        "NEW.\u00e4 := 1",
        "NEW.a := 'x' 1e5",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    """A call, query, clock, variable, veto or syntax that the grammar does not have is not known."""
    assert _read(f"BEGIN {text}; RETURN NEW; END") is None


@pytest.mark.parametrize(
    "body",
    [
        "",
        "BEGIN",
        "BEGIN NEW.a := 1; END",
        "BEGIN NEW.a := 1; RETURN NEW; END END",
        "BEGIN IF NEW.a > 1 THEN RETURN NEW; END IF; END",
        "DECLARE v int; BEGIN RETURN NEW; END",
        "#variable_conflict use_column\nBEGIN RETURN NEW; END",
        "<<l>> BEGIN RETURN NEW; END",
        "BEGIN NEW.a := 'open; RETURN NEW; END",
        "BEGIN IF NEW.a THEN RETURN NEW; END",
    ],
)
def test_a_body_that_does_not_return_the_new_row_at_its_end_is_refused(body: str) -> None:
    """A body without RETURN NEW at its end, with declarations or after its end, is not known."""
    assert _read(body) is None
