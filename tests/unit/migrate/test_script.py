"""A dump cut into statements: only at its own semicolons, whatever names and texts hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply.migrate.script import Item, ItemGroup, parse, runs, without_grants_to, without_system_grants

_HEAD = "--\n-- PostgreSQL database dump\n--\n\nSET statement_timeout = 0;\nSET default_tablespace = '';\n\n"


def _entry(name: str, kind: str, text: str) -> str:
    return f"--\n-- Name: {name}; Type: {kind}; Schema: public; Owner: x\n--\n\n{text}\n\n\n"


_INDEX = "CREATE INDEX i ON public.t USING btree (a);"
_KEY = 'ALTER TABLE ONLY public."T x"\n    ADD CONSTRAINT "k;" PRIMARY KEY (id);'
_FOREIGN = "ALTER TABLE public.c\n    ADD CONSTRAINT f FOREIGN KEY (a) REFERENCES public.t(id);"


def test_items_are_grouped_and_ordered() -> None:
    """Indexes and keys run beside each other up to what cannot; foreign keys and what follows are the second half."""
    script = parse(
        _HEAD
        + _entry("T x k;", "CONSTRAINT", _KEY)
        + _entry("i", "INDEX", _INDEX)
        + _entry("noted", "TRIGGER", "CREATE TRIGGER noted AFTER INSERT ON public.t EXECUTE FUNCTION public.f();")
        + _entry("c f", "FK CONSTRAINT", _FOREIGN)
        + _entry("z", "MATERIALIZED VIEW DATA", "REFRESH MATERIALIZED VIEW public.z;")
        + _entry("seen", "POLICY", "CREATE POLICY seen ON public.t USING ((a > 0));")
    )
    assert script.head == "SET statement_timeout = 0;\n"
    assert [[item.title for item in run] for run in runs(script.items)] == [
        ["constraint T x k;", "index i"], ["trigger noted"], ["fk constraint c f"], ["policy seen"],
    ]  # fmt: skip
    assert script.before_foreign_keys == script.items[:3]
    assert script.items[0].text == f"SET default_tablespace = '';\n{_KEY}\n"
    assert len({item.digest for item in script.items}) == len(script.items)


def test_grants_on_the_servers_own_objects_are_cut_out() -> None:
    """The rest is the same text, letter by letter; text that looks like such a grant within a body or string stays."""
    body = "GRANT ALL ON FUNCTION pg_catalog.f() TO x;"
    own = _entry("FUNCTION pg_ls_dir(text)", "ACL", 'GRANT ALL ON FUNCTION pg_catalog.pg_ls_dir(text) TO "x;y";')
    before = _HEAD + _entry(
        "f()", "FUNCTION", f"CREATE FUNCTION public.f() RETURNS text\n    AS $$BEGIN {body}\n{body} END$$;"
    )
    after = (
        _entry("TABLE pg_authid", "ACL", "GRANT SELECT(rolname) ON TABLE pg_catalog.pg_authid TO x;")
        + _entry("FUNCTION g(pg_catalog.int4)", "ACL", "GRANT ALL ON FUNCTION public.g(a pg_catalog.int4) TO x;")
        + _entry("t", "COMMENT", f"COMMENT ON TABLE public.t IS '\n{body}\n';")
    )
    text, left_out = without_system_grants(before + own + after)
    assert left_out == (
        'GRANT ALL ON FUNCTION pg_catalog.pg_ls_dir(text) TO "x;y"',
        "GRANT SELECT(rolname) ON TABLE pg_catalog.pg_authid TO x",
    )
    expected = before + own + after
    for one in left_out:
        expected = expected.replace(f"{one};", "")
    assert text == expected
    assert without_system_grants(text) == (text, ())


@pytest.mark.parametrize(("role", "written"), [("reader", "reader"), ('a "b', '"a ""b"')])
def test_grants_to_a_role_are_cut_out(role: str, written: str) -> None:
    """All that gives it something goes, and nothing that gives to another role or only looks like it."""
    gone = [
        f"GRANT USAGE ON SCHEMA s TO {written};",
        f"GRANT SELECT(id) ON TABLE s.t TO {written} WITH GRANT OPTION;",
        f"ALTER DEFAULT PRIVILEGES FOR ROLE postgres GRANT SELECT ON TABLES TO {written};",
        f"REVOKE ALL ON FUNCTION s.f() FROM {written};",
    ]
    kept = [
        "GRANT USAGE ON SCHEMA s TO reader2;",
        'GRANT USAGE ON SCHEMA s TO "x reader";',
        f"COMMENT ON TABLE s.t IS 'GRANT SELECT ON s.t TO {written}';",
        f"CREATE POLICY p ON s.t TO {written};",
        f"ALTER DEFAULT PRIVILEGES FOR ROLE {written} GRANT SELECT ON TABLES TO other;",
    ]
    text = _HEAD + "".join([_entry(str(number), "ACL", one) for number, one in enumerate([*gone, *kept])])
    expected = text
    for one in gone:
        expected = expected.replace(one, "")
    assert without_grants_to(text, role) == expected


def test_what_belongs_to_an_object_stays_with_it() -> None:
    """A tablespace set before an entry holds for it and the next ones; comments and CLUSTER ON are in one item."""
    script = parse(
        _HEAD
        + _entry("i", "INDEX", _INDEX + "\n\nALTER TABLE public.t CLUSTER ON i;")
        + _entry("INDEX i", "COMMENT", "COMMENT ON INDEX public.i IS 'x';")
        + "SET default_tablespace = fast;\n\n"
        + _entry("k", "CONSTRAINT", _KEY)
    )
    assert [item.text.splitlines()[0] for item in script.items] == [
        "SET default_tablespace = '';", "SET default_tablespace = fast;",
    ]  # fmt: skip
    assert script.items[0].text.endswith("ALTER TABLE public.t CLUSTER ON i;\nCOMMENT ON INDEX public.i IS 'x';\n")


@pytest.mark.parametrize(
    "text",
    [
        "CREATE RULE r AS ON INSERT TO public.t DO INSTEAD ( DELETE FROM public.t; SELECT ';'; );",
        "CREATE INDEX i ON public.t USING btree (foo$x$bar, (E'\\';' || ';''' || $$;$$ || $a$ $$;$a$));",
        'CREATE INDEX ";""--" ON public.t USING btree (a); -- \';',
    ],
)
def test_a_statement_ends_at_its_own_semicolon(text: str) -> None:
    """Semicolons, quotes and comment signs within names, strings, dollar quotes and parentheses end nothing."""
    script = parse(_HEAD + _entry("a", "RULE", text) + _entry("i", "INDEX", _INDEX))
    assert [item.title for item in script.items] == ["rule a", "index i"]


@given(st.text(alphabet="a;'\"$\\-\n/*() E", max_size=40))
def test_no_comment_becomes_a_statement(said: str) -> None:
    """The content of an object's comment is never run, not even in the form of a dump's own entries."""
    evil = said + _entry("evil", "INDEX", "DROP TABLE public.t;") + said
    quoted = evil.replace("'", "''")
    for text in (quoted, quoted.replace("\\", "\\\\")):
        prefix = "E" if text != quoted else ""
        script = parse(
            _HEAD
            + _entry("i", "INDEX", _INDEX)
            + _entry("INDEX i", "COMMENT", f"COMMENT ON INDEX public.i IS {prefix}'{text}';")
            + _entry("c f", "FK CONSTRAINT", _FOREIGN)
        )
        assert [item.group for item in script.items] == [ItemGroup.BUILD, ItemGroup.FOREIGN_KEY]


@pytest.mark.parametrize("text", ["CREATE INDEX 'a", "CREATE INDEX i ON public.t (a"])
def test_what_does_not_end_is_refused(text: str) -> None:
    """A script that was cut off is no script."""
    with pytest.raises(ValueError, match="does not end"):
        parse(_HEAD + _entry("i", "INDEX", text))


def test_runs_of_nothing() -> None:
    """Nothing to do is no run."""
    assert list(runs([])) == []
    one = Item(title="a", text="b", group=ItemGroup.SERIAL)
    assert list(runs([one, one])) == [[one], [one]]
