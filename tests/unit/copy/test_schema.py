"""Changes to a dump before it is run: of whole statements, never of a line within a text of others."""

from __future__ import annotations

from parapply.copy import schema
from parapply.copy.schema import edited

_HEAD = "--\n-- PostgreSQL database dump\n--\n\nSET statement_timeout = 0;\nSET transaction_timeout = 0;\n\n"
#: Forms of statements that are edited, as a text of the publisher's.
_SAID = (
    "SET transaction_timeout = 0;\n\\restrict key\nCREATE SCHEMA public;\n"
    "CREATE EVENT TRIGGER parapply_ddl_1_begin ON sql_drop EXECUTE FUNCTION f();\n\\unrestrict key\n"
)


def _entry(name: str, kind: str, text: str) -> str:
    return f"--\n-- Name: {name}; Type: {kind}; Schema: public; Owner: x\n--\n\n{text}\n\n\n"


_COMMENT = _entry("SCHEMA public", "COMMENT", f"COMMENT ON SCHEMA public IS '{_SAID}';")


def test_only_the_first_and_the_last_command_of_psql_go() -> None:
    """A user who has come to know the key cannot have another line taken out; without a key none is."""
    body = _HEAD + _COMMENT
    assert schema._without_key(f"\\restrict key\n{body}\\unrestrict key\n", "key") == body
    assert schema._without_key(body, "") == body


def test_what_targets_have_is_left_out_by_statements() -> None:
    """The event triggers of `init --ddl=automatic` go, and the schema that every target has is no error."""
    made = _entry("public", "SCHEMA", "CREATE SCHEMA public;")
    text = (
        "CREATE EVENT TRIGGER parapply_ddl_1_begin ON ddl_command_start\n   EXECUTE FUNCTION parapply.ddl_begins();",
        "COMMENT ON EVENT TRIGGER parapply_ddl_1_begin IS 'a; ''b''';",
    )
    own = [_entry(f"own {number}", "EVENT TRIGGER", one) for number, one in enumerate(text)]
    script = edited("".join([_HEAD, made, *own, _COMMENT]), schema._edit)
    assert all(one not in script for one in text)
    assert "\nCREATE SCHEMA IF NOT EXISTS public;\n" in script
    assert script.endswith(_COMMENT)


def test_only_settings_of_the_head_are_left_out() -> None:
    """A setting that the target does not know goes, where the dump sets it for its session."""
    head = _HEAD.replace("SET transaction_timeout = 0;", "")
    assert schema.fitting(_HEAD + _COMMENT, {"statement_timeout"}) == head + _COMMENT
