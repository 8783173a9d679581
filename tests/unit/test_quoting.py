"""Texts of others within SQL and HTML: what is quoted is one token, and says what it said before."""

from __future__ import annotations

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapply import quoting
from parapply.printable import printable

_TEXTS = st.text(alphabet="aZ1 '\"\\\n$;-/*%{}:.,é\x1b\u202e", max_size=20)


@given(_TEXTS)
def test_a_literal_is_one_token(text: str) -> None:
    """The text between the outer quotes has no single quote alone, and is the same once the server has read it."""
    for made in (quoting.literal(text), quoting.plain_literal(text)):
        has_escapes = made.startswith("E")
        inner = made.removeprefix("E")[1:-1]
        assert inner.replace("''", "").count("'") == 0
        read = inner.replace("''", "'")
        assert (read.replace("\\\\", "\\") if has_escapes else read) == text
    # With standard_conforming_strings off a plain literal would end elsewhere.
    assert quoting.literal(text).startswith("E") is ("\\" in text)


@given(st.lists(_TEXTS, min_size=1, max_size=4))
def test_an_identifier_is_one_token(names: list[str]) -> None:
    """No name ends its quotes, and a qualified one has a dot between its parts."""
    made = quoting.qualified(*names)
    assert made == ".".join(quoting.identifier(name) for name in names)
    assert all(quoting.identifier(name)[1:-1].replace('""', "").count('"') == 0 for name in names)


@given(st.lists(_TEXTS, max_size=4))
def test_each_name_of_a_list_is_a_literal_of_its_own(names: list[str]) -> None:
    """A list as the server prints it comes back name by name, whatever the names are."""
    stored = ", ".join(quoting.identifier(name) for name in names)
    values = ", ".join(map(quoting.literal, names)) or "''"
    assert quoting.setting("search_path", stored) == f'"search_path" TO {values}'


@given(st.lists(_TEXTS, min_size=1, max_size=4))
def test_an_option_of_a_connection_is_one_word(values: list[str]) -> None:
    """Words end at a space, and a backslash takes the next sign as it is, as in `pg_split_opts`."""
    made = " ".join([quoting.startup_option("work_mem", value) for value in values])
    words = [re.sub(r"\\(.)", r"\1", one, flags=re.DOTALL) for one in re.findall(r"(?:\\.|[^\\\s])+", made, re.DOTALL)]
    assert words == [word for value in values for word in ("-c", f"work_mem={value}")]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("search_path", "public;ALTER/**/ROLE/**/x/**/SUPERUSER", "'public;alter/**/role/**/x/**/superuser'"),
        ("search_path", ' "$user" ,Public', "'$user', 'public'"),
        ("Search_Path", "a,b", "'a', 'b'"),
        ("session_preload_libraries", "Lib', x", "'Lib''', 'x'"),
        ("search_path", '""', "''"),
        ("search_path", "", "''"),
        ("work_mem", "1', '2", "'1'', ''2'"),
        ("application_name", "a\\', b", "E'a\\\\'', b'"),
    ],
)
def test_a_setting_of_a_role_is_no_sql(name: str, value: str, text: str) -> None:
    """The value that a role has given a setting stays a value, of a list and of anything else."""
    assert quoting.setting(name, value) == f'"{name}" TO {text}'


@pytest.mark.parametrize("value", ["a b", "a,,b", "a,", '"a', '"a"b', ","])
def test_what_is_no_list_is_refused(value: str) -> None:
    """A value that the server itself would not read as a list is not made one."""
    with pytest.raises(ValueError, match="no list"):
        quoting.setting("local_preload_libraries", value)


def test_a_custom_setting_is_named_in_parts() -> None:
    """Each part of the name of an extension's setting is quoted by itself."""
    assert quoting.setting('my."x; --.y', "v") == '"my"."""x; --"."y" TO \'v\''


@pytest.mark.parametrize("quote", [quoting.literal, quoting.plain_literal, quoting.identifier])
def test_a_nul_is_refused(quote: object) -> None:
    """It would cut the statement off where C reads it."""
    assert callable(quote)
    with pytest.raises(ValueError, match="NUL"):
        quote("a\0b")


@given(st.lists(_TEXTS.filter(bool), min_size=1, max_size=2), _TEXTS)
def test_what_is_to_be_copied_prints(names: list[str], value: str) -> None:
    """Every character of a name and a value in advice prints; what prints all the same is written as usual."""
    written = f"UPDATE {quoting.qualified(*names)} SET a = {quoting.literal(value)};"
    made = quoting.copyable(written)
    assert made.isprintable()
    assert (made == written) is written.isprintable()
    assert quoting.shown_list([names]) == quoting.copyable(quoting.qualified(*names))


@given(st.text(max_size=20))
def test_a_string_of_toml(text: str) -> None:
    """A text of any characters is the same once it is read."""
    assert tomllib.loads(f"a = {quoting.toml_string(text)}") == {"a": text}


def test_no_other_module_doubles_quotes() -> None:
    """A rule for quotes stands in one module; the others are of a file's format, or of what a server prints."""
    allowed = {"quoting.py", "demo/cluster.py"}
    source = Path(quoting.__file__).parent
    doubling = re.compile(r"""replace\((["'])\\?["']\1, (["'])\\?["']{2}\2\)|chr\(39\)""")
    found = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if doubling.search(path.read_text(encoding="utf-8"))
    }
    assert found == allowed


@given(st.text(alphabet="aZ1 <>&lt;#x\"'=/!-\\\n\x1b\u202e", max_size=20))
def test_html_is_text_whatever_it_holds(text: str) -> None:
    """A parser finds no element in it, also within an attribute, and reads what prints as it was."""
    elements: list[tuple[str, str]] = []
    pieces: list[str] = []

    class _Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            elements.append((tag, attrs[0][1] or ""))

        def handle_data(self, data: str) -> None:
            pieces.append(data)

    parser = _Parser()
    parser.feed(f'<i title="{quoting.html(text)}">{quoting.html(text)}</i>')
    parser.close()
    assert elements == [("i", printable(text))]
    assert "".join(pieces) == printable(text)
    assert quoting.html(text).isprintable()
