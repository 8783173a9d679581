"""Rules of a provider, and the evidence for or against each that a server shows.

In: the rules, findings of the ordinary check, settings and addresses. Out: `Ruling`s, and findings whose fix is the
provider's. Pure.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec
from psycopg import sql

from parapply.check.findings import End, Finding
from parapply.check.kinds import KINDS
from parapply.check.providers import RULES, ProviderRule
from parapply.check.server import Server
from parapply.vocabulary import Provider

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from parapply.config import Config

#: As SHOW prints a setting that is on; Amazon's page has both.
_ON: Final = frozenset({"on", "1"})


class Status(StrEnum):
    """Evidence of a server about a rule, the worst first."""

    BROKEN = "broken"
    LOOK = "look"  # none: it is for people to look at
    KEPT = "kept"


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """A rule, and the evidence of the server at that end."""

    rule: ProviderRule
    end: End
    status: Status
    seen: str  # one phrase; empty if nothing is to be seen


class ProviderEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A server of a provider, as a session sees it."""

    provider: Provider
    end: End
    server: Server
    address: str  # host:port, as libpq connected


def rulings(place: ProviderEnd, findings: Iterable[Finding], config: Config) -> list[Ruling]:
    """Return the provider's rules for this end, the broken ones first."""
    found = {each.code: each.found for each in reversed([*findings]) if KINDS[each.code].end is place.end}
    ruled = [
        _ruling(rule, place, found.get(rule.code, "") if rule.code else "", config)
        for rule in RULES
        if rule.provider is place.provider and place.end in rule.ends
    ]
    order = list(Status)
    return sorted(ruled, key=lambda each: order.index(each.status))


def _ruling(rule: ProviderRule, place: ProviderEnd, found: str, config: Config) -> Ruling:
    ours, is_default = _ours(rule.key, config)
    shown = place.server.settings.get(rule.setting, "") if rule.setting and not (rule.key and is_default) else ""
    if found:
        status, seen = Status.BROKEN, found
    elif shown:
        status = Status.KEPT if shown in _ON else Status.BROKEN
        seen = f"{rule.setting} is {shown}"
    elif rule.host:
        is_port = rule.host.startswith(":")
        is_there = place.address.endswith(rule.host) if is_port else rule.host in place.address
        status = Status.BROKEN if is_there else Status.KEPT
        seen = f"the address is {place.address}"
    elif rule.code is not None:
        status, seen = Status.KEPT, "nothing against it was found"
    else:
        status, seen = Status.LOOK, ours
    return Ruling(rule=rule, end=place.end, status=status, seen=seen)


def _ours(key: str, config: Config) -> tuple[str, bool]:
    """Return a setting of ours as it is, without what may be secret, and whether it has its default."""
    if not key:
        return "", True
    section, name = key.split(".")
    of = getattr(config, section)
    value, default = getattr(of, name), getattr(type(of)(), name)
    if value == default:
        return f"{key} has its default", True
    return f"{key} is set" if name == "password_command" else f"{key} is {value}", False


def with_fixes(findings: Sequence[Finding], place: ProviderEnd) -> list[Finding]:
    """Return the findings of this end with the provider's remedies: PostgreSQL's own ones need a superuser."""
    role = sql.Identifier(place.server.role).as_string(None)
    fixes = {
        rule.code: rule.fix.format(role=role)
        for rule in RULES
        if rule.provider is place.provider and rule.fix and place.end in rule.ends
    }
    return [
        msgspec.structs.replace(each, fix=fixes[each.code])
        if each.code in fixes and KINDS[each.code].end is place.end
        else each
        for each in findings
    ]
