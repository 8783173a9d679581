"""Rules of providers: each is whole, and what a server shows decides which are kept and which are broken."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from parapply.check import show
from parapply.check.kinds import Code, End, Finding
from parapply.check.look import Report
from parapply.check.providers import RULES, ProviderEnd, ProviderRule, Ruling, Status, rulings, with_fixes
from parapply.check.server import SETTINGS, Server
from parapply.config import SECTIONS, Config, load_config
from parapply.vocabulary import Provider

_SERVER = Server(
    version_num=180000, role="ad min", database="app", is_superuser=False, has_replication=True, role_limit=-1,
    database_limit=-1, role_connections=1, database_connections=1, connections=1, may_create_schema=True,
    is_in_recovery=False, backend_pid=1, encoding="UTF8", collate="C", ctype="C", locale_provider="c",
    collation_version="", actual_collation_version="", settings={},
)  # fmt: skip


def _config(**flags: object) -> Config:
    ends = {"source.dsn": "host=a", "target.dsn": "host=b"}
    known: dict[str, object] = {**ends, "source.slot": "s", "source.publications": ("p",)}
    return load_config(flags={**known, **flags}, environ={})


def _place(provider: Provider, *, end: End = End.SOURCE, address: str = "db:5432", **settings: str) -> ProviderEnd:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    server = msgspec.structs.replace(_SERVER, settings=named)
    return ProviderEnd(provider=provider, end=end, server=server, address=address)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.provider}-{rule.name}")
def test_a_rule_is_whole(rule: ProviderRule) -> None:
    """It has the provider's page, a finding of the end that it is about, and names that exist."""
    assert re.match(r"https://[\w.-]+\.(com|net|org)/\S+$", rule.page)
    assert rule.says
    assert rule.do
    assert not rule.fix or rule.code
    assert rule.code is None or {rule.code.value.end} == {*rule.ends}
    assert not rule.setting or rule.setting in SETTINGS
    section, _, name = rule.key.partition(".")
    assert not section or name in SECTIONS[section].__struct_fields__


def test_every_provider_says_who_may_replicate_and_each_rule_is_named_once() -> None:
    """The right to replicate is the one that every one of them gives otherwise than PostgreSQL."""
    named = [(rule.provider, rule.name) for rule in RULES]
    assert len(set(named)) == len(named)
    assert {provider for provider, name in named if name == "replication_role"} == set(Provider)


_WAL = Finding(code=Code.WAL_LEVEL, found="wal_level is replica", fix="ALTER SYSTEM ...")
_AUTO = {"source.failover": "auto"}
_COMMAND = {"source.password_command": "token"}


@pytest.mark.parametrize(
    ("place", "name", "findings", "flags", "status", "seen"),
    [
        (_place(Provider.RDS), "logical_replication", [_WAL], {}, Status.BROKEN, "wal_level is replica"),
        (_place(Provider.RDS), "logical_replication", [], {}, Status.KEPT, "nothing against it was found"),
        (_place(Provider.RDS, rds__logical_replication="on"), "logical_replication", [], {}, Status.KEPT,
         "rds.logical_replication is on"),
        (_place(Provider.AURORA, rds__logical_replication="off"), "logical_replication", [], {}, Status.BROKEN,
         "rds.logical_replication is off"),
        # Tokens matter only where a command gets them.
        (_place(Provider.RDS, rds__iam_auth_for_replication="0"), "iam_tokens", [], {}, Status.LOOK,
         "source.password_command has its default"),
        (_place(Provider.RDS, rds__iam_auth_for_replication="0"), "iam_tokens", [], _COMMAND, Status.BROKEN,
         "rds.iam_auth_for_replication is 0"),
        (_place(Provider.RDS, rds__iam_auth_for_replication="1"), "iam_tokens", [], _COMMAND, Status.KEPT,
         "rds.iam_auth_for_replication is 1"),
        (_place(Provider.RDS), "iam_tokens", [], _COMMAND, Status.LOOK, "source.password_command is set"),
        (_place(Provider.AZURE), "failover_slots", [], _AUTO, Status.LOOK, "source.failover is auto"),
        (_place(Provider.AZURE, address="x.postgres.database.azure.com:6432"), "pooler", [], {}, Status.BROKEN,
         "the address is x.postgres.database.azure.com:6432"),
        (_place(Provider.AZURE, address="x.postgres.database.azure.com:64320"), "pooler", [], {}, Status.KEPT,
         "the address is x.postgres.database.azure.com:64320"),
        (_place(Provider.NEON, end=End.TARGET, address="ep-x-1-pooler.us-east-2.aws.neon.tech:5432"), "pooler", [], {},
         Status.BROKEN, "the address is ep-x-1-pooler.us-east-2.aws.neon.tech:5432"),
        (_place(Provider.SUPABASE, address="aws-0-x.pooler.supabase.com:5432"), "pooler", [], {}, Status.BROKEN,
         "the address is aws-0-x.pooler.supabase.com:5432"),
        (_place(Provider.NEON), "scale_to_zero", [], {}, Status.LOOK, ""),
    ],
)  # fmt: skip
def test_what_a_server_shows_of_a_rule(  # noqa: PLR0917
    place: ProviderEnd, name: str, findings: list[Finding], flags: dict[str, Any], status: Status, seen: str
) -> None:
    """A finding, a setting or an address decides; nothing of a kind leaves the rule to people."""
    (found,) = (each for each in rulings(place, findings, _config(**flags)) if each.rule.name == name)
    assert (found.status, found.seen, found.end) == (status, seen, place.end)


def test_the_rules_of_an_end_are_of_that_end_and_broken_ones_come_first() -> None:
    """A target's rules say nothing of slots, and an order of severity leads."""
    found = rulings(_place(Provider.RDS, end=End.TARGET, address="a.proxy-1.rds:5432"), [], _config())
    assert [(each.rule.name, each.status) for each in found] == [
        ("proxy", Status.BROKEN),
        ("session_replication_role", Status.KEPT),
    ]


def test_a_finding_gets_the_remedy_of_its_provider() -> None:
    """The role is quoted; findings of the other end, and of codes without a rule, keep theirs."""
    lacks = Finding(code=Code.SOURCE_REPLICATION, found="the role has no REPLICATION", fix="ALTER ROLE x REPLICATION;")
    role = Finding(code=Code.REPLICATION_ROLE, found="may not", fix="GRANT SET ...")
    fixed = with_fixes([_WAL, lacks, role], _place(Provider.RDS))
    assert [each.fix for each in fixed] == [
        "rds.logical_replication = 1 in a custom parameter group, then reboot",
        'GRANT rds_replication TO "ad min";  -- as a member of rds_superuser',
        "GRANT SET ...",
    ]
    (fixed_role,) = with_fixes([role], _place(Provider.SUPABASE, end=End.TARGET))
    assert fixed_role.fix == "ALTER ROLE \"ad min\" SET session_replication_role TO 'replica';  -- as postgres"


def _ruling(name: str, status: Status) -> Ruling:
    (rule,) = (each for each in RULES if (each.provider, each.name) == (Provider.NEON, name))
    return Ruling(rule=rule, end=End.SOURCE, status=status, seen="this")


def test_rules_are_shown_with_their_pages(capsys: pytest.CaptureFixture[str]) -> None:
    """A broken rule is a warning by its exit code; a page is never wrapped, and a kept rule asks for nothing."""
    ruled = (_ruling("pooler", Status.BROKEN), _ruling("inactive_slots", Status.KEPT))
    report = Report(slot="s", is_known=False, findings=(), plans=(), rulings=ruled)
    assert report.exit_code == 1
    assert Report(slot="s", is_known=False, findings=(), plans=(), rulings=ruled[1:]).exit_code == 0
    show.show(report, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "  broken  neon, pooler  source"
    assert [line.split()[0] for line in lines[1:5]] == ["rule", "seen", "do", ruled[0].rule.page]
    assert [line.split()[0] for line in lines[6:9]] == ["rule", "seen", ruled[1].rule.page]
    assert lines[-1].endswith("; rules of the providers: 1 broken, 0 look, 1 kept")
    show.show(report, as_json=True)
    found = json.loads(capsys.readouterr().out)["provider_rules"]
    assert [(one["provider"], one["end"], one["name"], one["status"], one["page"]) for one in found] == [
        ("neon", "source", each.rule.name, each.status.value, each.rule.page) for each in ruled
    ]
