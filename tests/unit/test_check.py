"""The codes of `parapply check`: every code has a meaning and is documented, and which types take which."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from parapply.check import show
from parapply.check.kinds import Code, End, Finding, Severity
from parapply.check.look import Report
from parapply.check.source import findings_of_publications, findings_of_publisher, publications_query
from parapply.check.tables import takes_all
from parapply.check.target import findings_of_machine
from parapply.config import Config, load_config
from parapply.source.slot import SlotFacts, SourceFacts

if TYPE_CHECKING:
    from pathlib import Path


def test_every_code_has_a_meaning() -> None:
    """No code is without end, severity, reason and advice."""
    assert all(code.value.why and code.value.advice for code in Code)
    assert [code for code in Code if code.value.is_arguable and code.value.severity is not Severity.REFUSED] == []


def test_words_wrap_on_a_terminal_and_sql_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal of 60 columns no line of words is longer, and each goes on below its begin; SQL stays whole."""
    fix = f"ALTER TABLE {'x' * 100} REPLICA IDENTITY FULL"
    code = next(iter(Code))
    finding = Finding(code=code, object="t", found="found " * 40, fix=fix)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    show.show(Report(slot="s", is_known=False, findings=(finding,), plans=()), as_json=False)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    words = [line.rstrip() for line in lines if fix not in line]
    assert len(words) < len(lines), "the statement is whole"
    assert max(map(len, words)) <= 60
    below = words[words.index(next(line for line in words if line.startswith("    - found"))) + 1]
    assert below.startswith("      found")


class _Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    severity: Severity
    code: str
    end: End
    object: str
    found: str
    why: str
    advice: str
    fix: str
    is_arguable: bool


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    slot_name: str
    is_known: bool
    exit_code: int
    findings: list[_Finding]
    tables: list[dict[str, Any]]
    provider_rules: list[dict[str, Any]]


@pytest.mark.parametrize(
    ("codes", "exit_code"),
    [
        ((), 0),
        ((Code.SEQUENCES,), 0),
        ((Code.SEQUENCES, Code.REPLICA_IDENTITY), 1),
        ((Code.REPLICA_IDENTITY, Code.TABLE_MISSING), 4),
        ((Code.TABLE_MISSING, Code.PUBLICATION_MISSING), 3),
    ],
)
def test_the_document_and_its_exit_code(codes: tuple[Code, ...], exit_code: int) -> None:
    """The JSON document has these keys and no others; the worst finding makes the exit code, the publisher's first."""
    findings = tuple(Finding(code=code, object='"s"."t"', found="this", fix="SELECT 1;") for code in codes)
    report = Report(slot="app", is_known=False, findings=findings, plans=())
    read = msgspec.json.decode(json.dumps(show.document(report)), type=_Document)
    assert (read.slot_name, read.exit_code, report.exit_code) == ("app", exit_code, exit_code)
    assert [one.code for one in read.findings] == [code.text for code in codes]


def test_a_place_that_cannot_be_seen_is_none_for_transactions(tmp_path: Path) -> None:
    """Whatever the system says of it, the others' findings are still shown."""
    (found,) = findings_of_machine(_config({"apply.spill_dir": str(tmp_path / ("x" * 300))}))
    assert (found.code, "File name too long" in found.found) == (Code.SPILL_DIR, True)


@pytest.mark.parametrize(
    ("source", "target", "is_taken"),
    [
        ("integer", "bigint", True),
        ("bigint", "integer", False),
        ("integer[]", "bigint[]", True),
        ("integer[]", "bigint", False),
        ("integer", "numeric", True),
        ("integer", "numeric(10,2)", False),
        ("numeric(10,2)", "numeric", True),
        ("numeric(10,2)", "numeric(12,2)", False),
        ("character varying(10)", "character varying(20)", True),
        ("character varying(20)", "character varying(10)", False),
        ("character varying", "character varying(10)", False),
        ("jsonb", "text", True),
        ("json", "jsonb", False),
        ("text[]", "text", True),
        ("timestamp(3) without time zone", "timestamp without time zone", True),
        ("timestamp without time zone", "timestamp with time zone", False),
        ("real", "double precision", True),
        ('"s"."odd (type)"', "integer", False),
    ],
)
def test_types_that_take_all_values(source: str, target: str, is_taken: bool) -> None:  # noqa: FBT001  a parameter
    """In doubt a type does not take all: that is a warning, and nothing else."""
    assert takes_all(source, target) is is_taken


_FACTS = SourceFacts(
    system_identifier="1", timeline=1, database="app", server_version_num=180000, wal_level="logical",
    is_in_recovery=False, wal_sender_timeout_s=60, decoding_memory_bytes=1 << 26, flush_lsn=1, slot=None,
)  # fmt: skip
_SLOT = SlotFacts(
    name="s", plugin="pgoutput", slot_type="logical", database="app", is_temporary=False, active_pid=None,
    confirmed_flush_lsn=1, wal_status="reserved", invalidation_reason=None, is_conflicting=False, is_two_phase=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "settings", "codes"),
    [
        ({}, {}, []),
        ({"wal_level": "replica"}, {}, [Code.WAL_LEVEL]),
        ({"wal_level": "replica", "server_version_num": 190000}, {}, []),
        ({"wal_level": "minimal", "server_version_num": 190000}, {}, [Code.WAL_LEVEL]),
        ({"wal_level": "replica", "server_version_num": 190000, "slot": _SLOT}, {}, [Code.SLOT_ADOPTED]),
        ({"is_in_recovery": True, "server_version_num": 150000}, {}, [Code.SOURCE_STANDBY]),
        ({"is_in_recovery": True, "hot_standby_feedback": False}, {}, [Code.STANDBY_FEEDBACK]),
        ({"server_version_num": 150000}, {"source.streaming": "parallel"}, [Code.STREAM_OPTIONS]),
        ({"server_version_num": 150000}, {"source.origin": "none"}, [Code.STREAM_OPTIONS]),
        ({}, {"source.streaming": "off"}, [Code.DECODING_SPILL]),
        ({"slot": _SLOT}, {}, [Code.SLOT_ADOPTED]),
        ({"slot": msgspec.structs.replace(_SLOT, active_pid=7)}, {}, [Code.SLOT_ADOPTED, Code.SLOT_IN_USE]),
        ({"slot": msgspec.structs.replace(_SLOT, slot_type="physical")}, {}, [Code.SLOT_REFUSED]),
        ({"slot": msgspec.structs.replace(_SLOT, plugin="test_decoding")}, {}, [Code.SLOT_REFUSED]),
        ({"slot": msgspec.structs.replace(_SLOT, database="other")}, {}, [Code.SLOT_REFUSED]),
        ({"slot": msgspec.structs.replace(_SLOT, wal_status="lost")}, {}, [Code.SLOT_REFUSED]),
        ({"slot": msgspec.structs.replace(_SLOT, is_two_phase=True)}, {}, [Code.SLOT_REFUSED]),
        ({"server_version_num": 170000}, {"source.failover": "auto", "source.two_phase": True}, [Code.SLOT_REFUSED]),
    ],
)
def test_what_is_said_of_the_publisher(facts: dict[str, Any], settings: dict[str, Any], codes: list[Code]) -> None:
    """The daemon's own refusals of a server and a slot are findings, each by itself."""
    found = findings_of_publisher(msgspec.structs.replace(_FACTS, **facts), _config(settings))
    assert [one.code for one in found] == codes


def _config(settings: dict[str, Any]) -> Config:
    flags = {"source.dsn": "host=a", "target.dsn": "host=b", "source.slot": "s", "source.publications": ("p",)}
    return load_config(flags={**flags, **settings}, environ={})


def test_a_publication_of_sequences_is_noted_where_the_version_has_them() -> None:
    """The catalogue of 19 has a column for it, which an older server is not asked for."""
    assert "puballsequences" in publications_query(190000)
    assert "puballsequences" not in publications_query(180004)
    rows = [("p", True, True, True, True, True), ("q", True, True, True, True, True)]
    found = list(findings_of_publications(rows, _config({})))
    assert [(one.code, one.object) for one in found] == [(Code.SEQUENCES_PUBLISHED, '"p"')]
    assert not list(findings_of_publications([("p", True, True, True, True, False)], _config({})))
