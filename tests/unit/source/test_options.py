"""The options of the stream and the pinned session of the publisher."""

from __future__ import annotations

import pytest
from psycopg.conninfo import conninfo_to_dict

from parapply.errors import ConfigError, SourceRefused
from parapply.source.options import source_conninfo, start_options, start_replication_sql


@pytest.mark.parametrize("server_version_num", [140000, 150018, 160014, 170010, 180004])
def test_only_what_is_applied_is_asked_for(server_version_num: int) -> None:
    """Streams, two-phase, binary and messages are never requested: nothing applies them yet."""
    options = start_options(server_version_num, ["p"], "any")
    assert options == (("proto_version", "1"), ("publication_names", '"p"'))


def test_origin_none_needs_16() -> None:
    """A publisher that cannot filter by origin is refused, not asked for something else."""
    assert start_options(160000, ["p"], "none")[-1] == ("origin", "none")
    with pytest.raises(SourceRefused, match="16"):
        start_options(150018, ["p"], "none")


def test_names_are_quoted_twice() -> None:
    """Publication names keep case, blanks, quotes, commas and backslashes through both parsers."""
    names = ["P q", 'a"b', "c,d", "e'f", "g\\h", "%s{}"]
    text = start_replication_sql("s_1", 0x16_B374D848, start_options(180004, names, "any"))
    assert text == (
        'START_REPLICATION SLOT "s_1" LOGICAL 16/B374D848 ("proto_version" \'1\', "publication_names" '
        '\'"P q","a""b","c,d","e\'\'f","g\\h","%s{}"\')'
    )


@pytest.mark.parametrize("names", [[], [""], ["a\0b"]])
def test_impossible_publications_are_refused(names: list[str]) -> None:
    """A list that no publisher could serve is a configuration error."""
    with pytest.raises(ConfigError):
        start_options(180004, names, "any")


@pytest.mark.parametrize("slot", ["", "A", 'a"b', "a b", "a" * 64])
def test_impossible_slot_names_are_refused(slot: str) -> None:
    """Only what PostgreSQL takes as a slot name reaches the replication grammar."""
    with pytest.raises(ConfigError):
        start_replication_sql(slot, 0, ())


def test_session_is_pinned_after_the_users_options() -> None:
    """Our settings come last and win; the user's application_name stays."""
    dsn = "host=h options='-c DateStyle=German' application_name=mine"
    parameters = conninfo_to_dict(source_conninfo(dsn, application_name="x", is_replication=True, connect_timeout_s=3))
    assert str(parameters["options"]).startswith("-c DateStyle=German -c DateStyle=ISO,\\ YMD")
    assert parameters["application_name"] == "mine"
    assert parameters["replication"] == "database"
    assert parameters["client_encoding"] == "UTF8"


def test_a_publisher_that_goes_without_a_word_is_noticed() -> None:
    """A session that waits for an answer has only TCP's keep-alives to notice it by; the DSN's own win."""
    dsn = "host=h keepalives_idle=7"
    parameters = conninfo_to_dict(source_conninfo(dsn, application_name="x", is_replication=True, connect_timeout_s=3))
    found = [parameters[f"keepalives_{what}"] for what in ("idle", "interval", "count")]
    assert [str(value) for value in found] == ["7", "10", "3"]


def test_less_memory_for_decoding_is_a_setting_of_the_session() -> None:
    """It wins over an option of the user's, whose whole setting is a key of its own; without it none is sent."""
    dsn = "host=h options='-c logical_decoding_work_mem=1GB'"
    plain = conninfo_to_dict(source_conninfo(dsn, application_name="x", is_replication=True, connect_timeout_s=3))
    assert str(plain["options"]).count("logical_decoding_work_mem") == 1
    less = source_conninfo(
        dsn, application_name="x", is_replication=True, connect_timeout_s=3, decoding_memory_bytes=65_536
    )
    assert str(conninfo_to_dict(less)["options"]).endswith(" -c logical_decoding_work_mem=64kB")


def test_a_bad_dsn_is_not_repeated() -> None:
    """A connection string holds a password: its error must not."""
    with pytest.raises(ConfigError) as caught:
        source_conninfo("password=secret nonsense", application_name="x", is_replication=False, connect_timeout_s=3)
    assert "secret" not in caught.value.line()
