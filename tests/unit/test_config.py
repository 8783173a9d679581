"""Configuration: bounds, order of the layers, all errors at once, and no secret in any text."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from parapply.config import REQUIRED, SECTIONS, Config, load_config, settings_without_table
from parapply.errors import ConfigError

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "config" / "parapply.toml"
SECRET = "s3cr3t-hunter2"
GIVEN: dict[str, object] = {
    "source.dsn": "dbname=a",
    "source.slot": "app",
    "source.publications": ("app",),
    "target.dsn": "dbname=b",
}


def errors_of(*overrides: str, path: Path | None = None, environ: dict[str, str] | None = None) -> list[str]:
    """Return the lines of the ConfigError these layers raise."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, GIVEN, environ or {})
    return str(caught.value).splitlines()


def all_keys() -> set[str]:
    """Return the dotted names of all keys."""
    return {f"{name}.{field.name}" for name, kind in SECTIONS.items() for field in msgspec.structs.fields(kind)}


def test_sample_file_names_every_key_and_equals_the_defaults() -> None:
    """config/parapply.toml loads, holds every key there is, and each with its default."""
    assert load_config(SAMPLE, environ={}, required=()) == Config()
    sections = tomllib.loads(SAMPLE.read_text())
    assert {f"{section}.{key}" for section, keys in sections.items() for key in keys} == all_keys()


def test_sample_file_explains_every_key() -> None:
    """Each key of the sample stands below a comment, of its own or of the keys just above it."""
    explained = False
    for line in SAMPLE.read_text().splitlines():
        assert explained or "=" not in line or line.startswith("#"), line
        explained = line.startswith("#") or (explained and "=" in line)


def test_order_of_layers(tmp_path: Path) -> None:
    """File is overridden by the environment, that by --set, that by flags, key by key."""
    path = tmp_path / "app.toml"
    path.write_text(
        '[source]\nslot = "file"\norigin = "none"\n[apply]\nworkers = 2\nlinger_s = 1\n[log]\nlevel="error"'
    )
    environ = {"PARAPPLY_APPLY__WORKERS": "3", "PARAPPLY_LOG__LEVEL": "debug", "PARAPPLY_SOURCE__SLOT": "environment"}
    config = load_config(path, ["log.level=warning", "source.slot=override"], GIVEN, environ)
    assert config.apply.workers == 3
    assert config.apply.linger_s == 1.0
    assert config.log.level == "warning"
    assert config.source.slot == "app"
    assert config.source.origin == "none"


def test_an_end_that_is_back_is_tried_as_soon_as_by_the_built_in_subscription() -> None:
    """Pauses grow to no more than PostgreSQL's default of wal_retrieve_retry_interval."""
    assert Config().source.reconnect_max_s <= 5


def test_the_number_of_workers_may_find_itself() -> None:
    """A number is first and most at once; "auto" begins with four, or with the most if that is less."""
    for override, workers, first, most in (
        (["apply.workers=8"], 8, 8, 8),
        (["apply.workers=auto"], "auto", 4, 16),
        (["apply.workers=auto", "apply.max_workers=3"], "auto", 3, 3),
    ):
        apply = load_config(None, override, GIVEN, {}).apply
        assert (apply.workers, apply.first_workers, apply.most_workers) == (workers, first, most)
    with pytest.raises(ConfigError, match=r'apply\.workers: must be a whole number from 1 to 64, or "auto"'):
        load_config(None, ["apply.workers=many"], GIVEN, {})


@pytest.mark.parametrize("text", ["a,b", "a, b", '["a","b"]'])
def test_lists_in_texts(text: str) -> None:
    """A list in the environment or --set is JSON or separated by commas."""
    flags = {**GIVEN, "source.publications": ()}
    assert load_config(None, [f"source.publications={text}"], flags, {}).source.publications == ("a", "b")
    environ = {"PARAPPLY_SOURCE__PUBLICATIONS": text}
    assert load_config(None, (), flags, environ).source.publications == ("a", "b")


@pytest.mark.parametrize("name", ["Upper", "a-b", "a b", "x" * 64])
def test_slot_names(name: str) -> None:
    """A slot name is what PostgreSQL takes: 1 to 63 lower-case letters, digits and underscores."""
    with pytest.raises(ConfigError, match=r"^source\.slot: must be 1 to 63"):
        load_config(None, (), {**GIVEN, "source.slot": name}, {})


def test_table_sections() -> None:
    """A table is addressed by its quoted name and holds its own keys."""
    config = load_config(None, ['apply.tables."public.Or.ders".parallel=never'], GIVEN, {})
    assert config.apply.tables["public.Or.ders"].parallel == "never"


def test_commands_of_a_cut_over_are_lists_at_known_places(tmp_path: Path) -> None:
    """A place is before or after a step; a command that takes another one back is not alone."""
    path = tmp_path / "app.toml"
    path.write_text(
        '[cutover.commands]\nbefore_fencing = ["a", "b c"]\nundo_before_fencing = ["d"]\nafter_ending = ["e"]\n'
    )
    given = {"before_fencing": ("a", "b c"), "undo_before_fencing": ("d",), "after_ending": ("e",)}
    assert load_config(path, (), GIVEN, {}).cutover.commands == given
    path.write_text(
        '[cutover.commands]\nbefore_fence = ["a"]\nafter_done = ["a"]\nbefore_opening = "a"\nafter_opening = []\n'
        'undo_after_turning = ["a"]\n[cutover]\npoolers = ["a=b"]\npooler_files = ["a", "b"]\n'
    )
    assert errors_of(path=path) == [
        "cutover.commands.before_fence: unknown key; did you mean before_fencing?",
        "cutover.commands.after_done: unknown key; did you mean after_opening?",
        "cutover.commands.before_opening: must be a list of a program and its arguments",
        "cutover.commands.after_opening: must be a list of a program and its arguments",
        "cutover.commands.undo_after_turning: after_turning, which it takes back, is missing",
        'cutover.poolers: must be a connection string: "host=... dbname=..." or postgresql://...',
    ]
    path.write_text('[cutover]\npoolers = ["host=a"]\npooler_files = ["a", "b"]\n')
    assert errors_of(path=path) == ["cutover: pooler_files must name one file for each of poolers, or one for all"]


def test_all_errors_at_once(tmp_path: Path) -> None:
    """Unknown keys, wrong types, ranges and missing keys of all layers are one error, a line each."""
    path = tmp_path / "app.toml"
    path.write_text('[apply]\nworkers = "4"\nlinger_s = true\n[sorce]\nslot = "x"\n[apply.tables.nodot]\n')
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["apply.worker=3", "log.level=loud", "x"], {}, {"PARAPPLY_TARGET__LEASE_WAIT_S": "-1"})
    lines = str(caught.value).splitlines()
    for start in (
        "apply.workers: must be",
        "apply.linger_s: must be",
        "sorce: unknown key; did you mean source?",
        'apply.tables.nodot: must be written "schema.table"',
        "apply.worker: unknown key; did you mean workers?",
        "log.level: must be",
        "--set (number 3): must be section.key=value",
        "target.lease_wait_s: must be",
        "source.dsn: is required",
        "source.slot: is required",
        "source.publications: is required",
        "target.dsn: is required",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, (start, lines)
    assert len(lines) == 12


@pytest.mark.parametrize(
    "override",
    [
        "apply.workers=0",
        "apply.workers=65",
        "apply.workers=1.5",
        "apply.max_workers=1",
        "apply.commit_order=any",
        "apply.linger_s=nan",
        "apply.linger_s=inf",
        "apply.max_batch_bytes=999999999999",
        "source.origin=local",
        "source.reconnect_min_s=60",
        "source.status_interval_s=0",
        "target.state_schema=pg_parapply",
        "target.state_schema=",
        "target.synchronous_commit=maybe",
        "applylog.rotate_s=0",
    ],
)
def test_bounds(override: str) -> None:
    """A value outside its bounds is one error that names its key or its section."""
    lines = errors_of(override)
    assert len(lines) == 1
    assert lines[0].startswith(override.partition(".")[0])


@pytest.mark.parametrize(
    ("other", "key"), [("source.origin=none", "source"), ("apply.delay_s=1", "source.on_lost_slot")]
)
def test_a_heal_by_the_daemon_excludes_what_it_would_break(other: str, key: str) -> None:
    """Rows of the target's own clients, and rows that are held back, would be lost or come too early."""
    (line,) = errors_of("source.on_lost_slot=heal", other)
    assert line.startswith(f"{key}: on_lost_slot must be" if key == "source" else f"{key}: must be")


def test_secrets_never_print() -> None:
    """No representation, dump or error shows a connection string, whichever way it was wrong."""
    uri = f"postgresql://u:{SECRET}@h/db"
    config = load_config(None, (), {**GIVEN, "source.dsn": uri, "target.dsn": f"password={SECRET}"}, {})
    assert config.source.dsn.get_secret_value() == uri
    assert SECRET not in repr(config) + str(config) + str(msgspec.structs.asdict(config.source))
    assert config.source.dsn == Config(source=config.source).source.dsn != config.target.dsn
    with pytest.raises(TypeError):
        msgspec.json.encode(config)
    slips = ["source.dsn=={}", "{}", "postgresql://u:{}@h/db?x=1", "source.dsn.x={}", "apply.x={}", "log.level={}"]
    slips += ["source.slot={}", "source.publications={0},{0}", "apply.workers={}", "target.state_schema=pg_{}"]
    for overrides in [[slip.format(SECRET)] for slip in slips]:
        with pytest.raises(ConfigError) as caught:
            load_config(None, overrides, {}, {"PARAPPLY_TARGET__DSN": f"pass word {SECRET}"})
        assert SECRET not in repr(caught.value) + str(caught.value)
        assert caught.value.__context__ is None
        assert caught.value.__cause__ is None


@pytest.mark.parametrize("key", ["source.dsn", "source.slot", "source.publications", "target.state_schema"])
def test_bytes_that_are_no_text_are_an_error(key: str) -> None:
    """A variable may hold any bytes; bytes that are not UTF-8 are reported before a server is asked."""
    with pytest.raises(ConfigError, match=rf"(?m)^{key}: must be"):
        load_config(None, (), {}, {f"PARAPPLY_{key.replace('.', '__').upper()}": "a\udcff"})


def test_broken_file_is_told_without_its_text(tmp_path: Path) -> None:
    """A file that is not TOML, or not there, is an error that names it and quotes nothing."""
    path = tmp_path / "app.toml"
    path.write_text(f'[source]\ndsn = "{SECRET}\n')
    lines = errors_of(path=path)
    assert len(lines) == 1
    assert lines[0].startswith(f"--config: {path} is not TOML (at line 2")
    assert SECRET not in lines[0]
    (line,) = errors_of(path=tmp_path / "none.toml")
    assert line.endswith("No such file or directory")
    path.write_bytes(b"\xef\xbb\xbf[source]\nslot = 'app'\n")
    assert load_config(path, (), {}, {}, required=()).source.slot == "app", "as some editors write UTF-8"


@pytest.mark.parametrize(
    ("dsn", "rule"),
    [
        ("host=a dbnam=e", "unknown parameter dbnam; did you mean dbname?"),
        ("postgresql://a/b?sslmod=require", "unknown parameter sslmod; did you mean sslmode?"),
        (f"host=a password=x {SECRET}=1", 'must be a connection string: "host=... dbname=..." or postgresql://...'),
        ("host=a replication=database", "must not name replication: parapply asks for it where it is needed"),
    ],
)
def test_a_connection_string_is_told_what_is_wrong_with_it(dsn: str, rule: str) -> None:
    """A slip in a parameter's name is named, unless it may be of a password; so is what would change every session."""
    for key in ("source.dsn", "target.dsn"):
        with pytest.raises(ConfigError) as caught:
            load_config(None, (), {**GIVEN, key: dsn}, {})
        assert str(caught.value) == f"{key}: {rule}"


@pytest.mark.parametrize(
    "uri",
    [
        "u:p@{}@h/db", "u:p@@{}@h/db", "u:p@{}/x@h/db", "u:p@/{}@h/db", "u:1/{}@h/db", "u:{}/x@h/db", "u:p@a:{}@h/db",
        "u:p@a,{}@h/db", "u:p?{}@x@h/db",
    ],
)  # fmt: skip
def test_a_password_that_cuts_a_uri_is_refused(uri: str) -> None:
    """A part of it would be a host, a port or a database, and the errors of a connection show those."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, (), {}, {"PARAPPLY_TARGET__DSN": f"postgresql://{uri.format(SECRET)}"}, required=())
    assert SECRET not in str(caught.value)
    assert "a password's @ is %40" in str(caught.value)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:a%40b%2Fc@h,i:1,[::1]:2/d%40e?sslcert=a@b",
        "postgres://u@/d?host=@socket",
        "postgresql://%2Frun%2Fa%40b/d",
        "postgresql://u@h?user=a/b@c",
        "host=/run/a@b,c port=1,",
        "host=a password=b@c/d@e dbname=f@g",
    ],
)
def test_a_connection_string_with_signs_of_its_own_is_taken(dsn: str) -> None:
    """Sockets, several hosts, and an @ that is escaped or is none of an address."""
    assert load_config(None, (), {**GIVEN, "source.dsn": dsn}, {}).source.dsn.get_secret_value() == dsn


def test_single_underscore_is_an_error() -> None:
    """PARAPPLY_SOURCE_DSN, a likely slip, is not passed over; variables that are no configuration are."""
    lines = errors_of(environ={"PARAPPLY_SOURCE_DSN": SECRET, "PARAPPLY_FAILPOINT": "x", "PARAPPLY_PGBIN": "y"})
    assert len(lines) == 1
    assert lines[0].startswith("PARAPPLY_SOURCE_DSN: ")
    assert SECRET not in lines[0]


def test_only_what_a_command_needs_is_required() -> None:
    """A command names what it cannot do without; the rest may be missing."""
    assert load_config(None, (), {"target.dsn": "dbname=b"}, {}, required=["target.dsn"]).source.slot == ""
    with pytest.raises(ConfigError, match=r"^source\.slot: is required; give --slot, PARAPPLY_SOURCE__SLOT"):
        load_config(None, (), {"target.dsn": "dbname=b"}, {}, required=["target.dsn", "source.slot"])
    assert set(REQUIRED) <= all_keys()


def test_configuration_is_frozen() -> None:
    """The configuration cannot be changed after it was loaded."""
    config = load_config(None, (), GIVEN, {})
    with pytest.raises(AttributeError, match="immutable"):
        config.apply.workers = 8  # type: ignore[misc]
    with pytest.raises(AttributeError, match="immutable"):
        config.log = Config().log  # type: ignore[misc]


def test_a_variable_may_name_a_file_with_the_value(tmp_path: Path) -> None:
    """PARAPPLY_SECTION__KEY_FILE: the file's text is the value, as services are given secrets."""
    secret = tmp_path / "dsn"
    secret.write_text(f"host=a password={SECRET}\n")
    flags = {key: value for key, value in GIVEN.items() if key != "source.dsn"}
    config = load_config(None, ["source.slot=other"], flags, {"PARAPPLY_SOURCE__DSN_FILE": str(secret)})
    assert config.source.dsn.get_secret_value() == f"host=a password={SECRET}"


def test_a_file_with_a_value_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A file that is missing, no text, or given twice is a line, without a value; a key of that name is none."""
    (tmp_path / "bytes").write_bytes(SECRET.encode() + b"\xff")
    environ = {
        "PARAPPLY_SOURCE__DSN_FILE": str(tmp_path / "missing"),
        "PARAPPLY_TARGET__DSN_FILE": str(tmp_path / "bytes"),
        "PARAPPLY_SOURCE__SLOT_FILE": str(tmp_path / "bytes"),
        "PARAPPLY_SOURCE__SLOT": SECRET,
        "PARAPPLY_SOURCE__NOTHING_FILE": "x",
    }
    lines = errors_of(environ=environ)
    assert f"PARAPPLY_SOURCE__DSN_FILE: cannot read {tmp_path / 'missing'}: No such file or directory" in lines
    assert "PARAPPLY_TARGET__DSN_FILE: the file is not UTF-8 text" in lines
    assert "PARAPPLY_SOURCE__SLOT_FILE: PARAPPLY_SOURCE__SLOT is also set: only one of them may be" in lines
    assert any(line.startswith("source.nothing_file: unknown key") for line in lines)
    assert not [line for line in lines if SECRET in line]


def test_the_environment_is_read_only_through_load_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Config() alone reads no environment; load_config does, by default the process's."""
    monkeypatch.setenv("PARAPPLY_APPLY__WORKERS", "7")
    monkeypatch.setenv("SOURCE", "{}")
    assert Config().apply.workers == "auto"
    assert load_config(None, (), GIVEN).apply.workers == 7


@pytest.mark.parametrize("text", ["n = " + "1" * 5000, "n = " + "[" * 5000], ids=["number", "depth"])
def test_a_file_that_is_too_much_for_the_parser_is_no_toml(tmp_path: Path, text: str) -> None:
    """Numbers too long and values too deep are a mistake in the file, as any other; the line is not repeated."""
    path = tmp_path / "app.toml"
    path.write_text(text)
    assert errors_of(path=path) == [f"--config: {path} is not TOML"]


def test_a_list_that_is_too_deep_is_a_wrong_value() -> None:
    """The parser's own limit is no reason to fail otherwise."""
    with pytest.raises(ConfigError, match=r"^source\.publications: "):
        load_config(None, ["source.publications=" + "[" * 5000], {}, {}, required=())


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (['mapping.tables."public.a"=b'], 'both names must be written "schema.table"'),
        (["mapping.schemas.a=b.c"], "both names must be written as the name of a schema"),
        (
            ['mapping.tables."public.a"=x.c', 'mapping.tables."public.b"=x.c'],
            "two of the publisher's names lead to one",
        ),
        (["mapping.schemas.a=b", "ddl.apply=true"], "must be empty with ddl.apply"),
        (
            ["mapping.schemas.a.schema=c", "mapping.schemas.b.schema=c", "mapping.schemas.a.set.n=1"],
            "no constants distinguish their rows",
        ),
        (
            ["mapping.schemas.a.set.n=1", "mapping.schemas.b.schema=a", "mapping.schemas.b.set.m=2"],
            "no constants distinguish their rows",
        ),
        (["mapping.schemas.a.schemas=c"], "mapping.schemas.a.schemas: unknown key; did you mean schema?"),
        (["mapping.schemas.a.set=c"], "must be a section of columns"),
        (['mapping.tables."a.b".omit=x,,y'], "must be a list of columns' names"),
        (['mapping.tables."a.b".omit=x', 'mapping.tables."a.b".set.x=1'], "two of `set`, `omit` and `replace`: x"),
        (['mapping.tables."a.b".omit=x', 'mapping.tables."a.b".replace.x=y'], "two of `set`, `omit` and `replace`: x"),
        (['mapping.tables."a.b".replace=x'], "must be a section of columns, each with an SQL expression"),
        (['mapping.tables."a.b".replace.x= '], "must be a section of columns, each with an SQL expression"),
        (["mapping.schemas.a.replace.x=y"], "mapping.schemas.a.replace: unknown key"),
        (['mapping.tables."a.b".replace.x=y', "source.origin=none"], "no `replace` or `omit` with source.origin"),
        (['mapping.tables."a.b".omit=x', "source.origin=none"], "no `replace` or `omit` with source.origin"),
        (
            ['mapping.tables."a.b".replace.x=y', "source.on_lost_slot=heal"],
            'on_lost_slot: must be "stop" with `replace`',
        ),
        (["mapping.schemas.a.omit=x"], "mapping.schemas.a.omit: unknown key"),
        (["mapping.schema_only=a.b,c"], 'schema_only: must be written "schema.table": c'),
    ],
)
def test_names_on_the_target_are_checked(overrides: list[str], rule: str) -> None:
    """A mapping that cannot be followed, or that commands of the publisher would not follow, is refused."""
    with pytest.raises(ConfigError, match=re.escape(rule)):
        load_config(None, overrides, GIVEN, {})


def test_a_table_has_its_own_name_before_that_of_its_schema() -> None:
    """A table with a name is not taken for one of its schema; one whose section gives none is, with its constants."""
    given = ['mapping.tables."a.t"=x.y', "mapping.schemas.a.schema=b", "mapping.schemas.a.set.n=1",
             'mapping.tables."a.v".omit=x', 'mapping.tables."a.w".set.n=2']  # fmt: skip
    mapping = load_config(None, given, GIVEN, {}).mapping
    names = [("a", "t"), ("a", "u"), ("c", "t"), ("a", "v"), ("a", "w")]
    assert [mapping.target_of(name) for name in names] == [
        ("x", "y"), ("b", "u"), ("c", "t"), ("b", "v"), ("b", "w"),
    ]  # fmt: skip
    assert [mapping.constants_of(name) for name in names] == [{}, {"n": "1"}, {}, {"n": "1"}, {"n": "2"}]
    assert mapping.shown(("a", "u")) == "a.u (b.u on the target)"


def test_constants_of_tables_and_schemas(tmp_path: Path) -> None:
    """Values are kept as PostgreSQL reads them; a table that is named has only its own values."""
    path = tmp_path / "app.toml"
    path.write_text(
        '[mapping.tables]\n"a.t" = { table = "x.y", set = { n = 7, is_eu = true, "Na me" = "it\'s" } }\n'
        '"b.t" = { table = "x.y", set = { n = 8, is_eu = true, "Na me" = "it\'s" } }\n'
        "[mapping.schemas]\na = { set = { n = -1 } }\n"
    )
    mapping = load_config(path, [], GIVEN, {}).mapping
    assert [mapping.constants_of(name) for name in (("a", "t"), ("a", "u"), ("c", "t"))] == [
        {"n": "7", "is_eu": "true", "Na me": "it's"}, {"n": "-1"}, {},
    ]  # fmt: skip
    assert mapping.target_of(("b", "t")) == ("x", "y")


def test_columns_and_rows_that_are_left_out() -> None:
    """Tables without rows leave commands of the publisher allowed; a table with fewer columns has another place."""
    mapping = load_config(None, ["mapping.schema_only=a.t,a.u", "ddl.apply=true"], GIVEN, {}).mapping
    assert mapping.is_empty
    assert [mapping.is_schema_only(("a", table)) for table in ("t", "u", "v")] == [True, True, False]
    mapping = load_config(None, ['mapping.tables."a.t".omit=x,y'], GIVEN, {}).mapping
    assert (mapping.omits, mapping.omitted_of(("a", "t")), mapping.omitted_of(("a", "u"))) == (True, ("x", "y"), ())
    assert mapping.target_of(("a", "t")) == ("a", "t")
    assert list(mapping.replaced_unknown(["a.u"])) == ['mapping.tables."a.t".omit']


def test_names_of_schemas_without_a_published_table_are_told() -> None:
    """A misspelt one would be no rule, and the tables would come as they are."""
    config = load_config(None, ["mapping.schemas.pubilc=shop", "mapping.schemas.a=b"], GIVEN, {})
    assert settings_without_table(config, ["public.t", "a.t"]) == {
        "mapping.schemas.pubilc": "no table of schema pubilc is published; did you mean public?"
    }


def test_another_option_is_named(tmp_path: Path) -> None:
    """An error in a file that another option names is reported for that option, line for line."""
    path = tmp_path / "back.toml"
    path.write_text("[source]\ndsn = 1\nslott = 's'\n")
    for wrong in (path, tmp_path / "none.toml"):
        with pytest.raises(ConfigError) as caught:
            load_config(wrong, environ={}, option="--reverse")
        assert all(line.startswith("--reverse: ") for line in str(caught.value).splitlines())
