"""Rules of services that run PostgreSQL for others, each with the page of the provider that states it. Pure data.

A rule says one thing that the provider allows or needs, and the command or setting that fits. It is only here if it was
read in its page; a page may have changed since.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec
from psycopg import sql

from parapply.check.kinds import Code, End, Finding
from parapply.check.server import Server
from parapply.vocabulary import Provider

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from parapply.config import Config

#: As SHOW prints a setting that is on; Amazon's page has both.
_ON: Final = frozenset({"on", "1"})


class ProviderRule(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a provider allows or needs, and the evidence of it on a server, as far as there can be one."""

    provider: Provider
    name: str
    says: str  # one sentence about the provider
    do: str  # the setting, command or step of ours that fits
    page: str  # address of the documentation
    ends: tuple[End, ...] = (End.SOURCE,)
    code: Code | None = None  # finding of the ordinary check that the rule explains
    fix: str = ""  # of that finding, in the place of PostgreSQL's own, which needs a superuser; {role}: the session's
    setting: str = ""  # of the server, which must be on; servers of others do not know it
    key: str = ""  # of our configuration that the rule is about; while it has its default, `setting` does not matter
    host: str = ""  # part of a host name or ":port" of an address that the rule forbids


_BOTH: Final = (End.SOURCE, End.TARGET)
_DOCS: Final = "https://docs.aws.amazon.com/AmazonRDS/latest"
_RDS: Final = f"{_DOCS}/UserGuide"
_AURORA: Final = f"{_DOCS}/AuroraUserGuide"
_GOOGLE: Final = "https://cloud.google.com/sql/docs/postgres"
_AZURE: Final = "https://learn.microsoft.com/en-us/azure/postgresql"
_NEON: Final = "https://neon.com/docs/guides/logical-replication-neon"
_SUPABASE: Final = "https://supabase.com/docs/guides/database"

_AMAZON_ROLE: Final = "Appendix.PostgreSQL.CommonDBATasks.Roles.rds_superuser.html"
_PARAMETER_GROUP: Final = "rds.logical_replication = 1 in a custom {}, then reboot{}"
_GRANT: Final = "GRANT rds_replication TO {role};  -- as a member of rds_superuser"
_HEAL: Final = "after a loss `parapply heal` makes the slot again and copies what differs"
_RETAINED: Final = "set source.retained_wal_limit_bytes, and source.on_retained_wal to what is to happen then"
_FAILOVER: Final = "source.failover = 'auto' makes it a failover slot"

RULES: Final = (
    ProviderRule(
        provider=Provider.RDS, name="logical_replication", code=Code.WAL_LEVEL, setting="rds.logical_replication",
        says="the static parameter rds.logical_replication sets wal_level = logical when the instance reboots",
        do=_PARAMETER_GROUP.format("parameter group", ""), fix=_PARAMETER_GROUP.format("parameter group", ""),
        page="https://aws.amazon.com/premiumsupport/knowledge-center/rds-postgresql-use-logical-replication/",
    ),
    ProviderRule(
        provider=Provider.RDS, name="replication_role", code=Code.SOURCE_REPLICATION, fix=_GRANT,
        says="no user is a superuser; members of rds_superuser grant rds_replication, which is the right to replicate",
        do="grant rds_replication to the role of source.dsn", page=f"{_RDS}/{_AMAZON_ROLE}",
    ),
    ProviderRule(
        provider=Provider.RDS, name="iam_tokens", setting="rds.iam_auth_for_replication", key="source.password_command",
        says="tokens of IAM open replication connections only with rds.iam_auth_for_replication = 1, a dynamic"
        " parameter",
        do="source.password_command gets a token for each connection",
        page=f"{_RDS}/PostgreSQL.Concepts.General.FeatureSupport.IAMLogicalReplication.html",
    ),
    ProviderRule(
        provider=Provider.RDS, name="failover_slots", key="source.failover",
        says="from 17 on slots outlive the promotion of a read replica: sync_replication_slots, hot_standby_feedback"
        " and rds.logical_slot_sync_dbname there, synchronized_standby_slots on the primary",
        do=_FAILOVER, page=f"{_RDS}/Appendix.PostgreSQL.CommonDBATasks.pglogical.slot.synchronization.html",
    ),
    ProviderRule(
        provider=Provider.RDS, name="read_replica", code=Code.SOURCE_STANDBY,
        says="a read replica of 16.1 and later decodes, if logical replication is on for it and for its source",
        do="source.dsn may name such a replica", page=f"{_RDS}/USER_PostgreSQL.Replication.ReadReplicas.html",
    ),
    ProviderRule(
        provider=Provider.RDS, name="proxy", ends=_BOTH, host=".proxy-",
        says="RDS Proxy does not support streaming replication",
        do="name the endpoint of the instance in the DSN", page=f"{_RDS}/rds-proxy.troubleshooting.html",
    ),
    ProviderRule(
        provider=Provider.RDS, name="session_replication_role", ends=(End.TARGET,), code=Code.REPLICATION_ROLE,
        key="target.session_replication_role",
        says="session_replication_role is set in the parameter group, for every session of the instance",
        do="set it to replica there while nothing else writes, or target.session_replication_role = 'origin'",
        fix="target.session_replication_role = 'origin', or replica in the parameter group",
        page="https://docs.aws.amazon.com/dms/latest/userguide/CHAP_Target.PostgreSQL.html",
    ),
    ProviderRule(
        provider=Provider.AURORA, name="logical_replication", code=Code.WAL_LEVEL, setting="rds.logical_replication",
        says="rds.logical_replication of the cluster's parameter group takes effect when the writer reboots",
        do=_PARAMETER_GROUP.format("cluster parameter group", " the writer"),
        fix=_PARAMETER_GROUP.format("cluster parameter group", " the writer"),
        page=f"{_AURORA}/AuroraPostgreSQL.Replication.Logical.Configure.html",
    ),
    ProviderRule(
        provider=Provider.AURORA, name="replication_role", code=Code.SOURCE_REPLICATION, fix=_GRANT,
        says="no user is a superuser; members of rds_superuser grant rds_replication, which is the right to replicate",
        do="grant rds_replication to the role of source.dsn", page=f"{_AURORA}/{_AMAZON_ROLE}",
    ),
    ProviderRule(
        provider=Provider.AURORA, name="iam_tokens", setting="rds.iam_auth_for_replication",
        key="source.password_command",
        says="tokens of IAM open replication connections only with rds.iam_auth_for_replication = 1, a dynamic"
        " parameter of the cluster",
        do="source.password_command gets a token for each connection",
        page=f"{_AURORA}/AuroraPostgreSQL.Replication.Logical.IAM-auth.html",
    ),
    ProviderRule(
        provider=Provider.AURORA, name="inactive_slots", key="source.retained_wal_limit_bytes",
        says="an inactive slot keeps vacuum from removing old rows; Amazon's advice is to watch and remove such slots",
        do=_RETAINED, page=f"{_AURORA}/AuroraPostgreSQL.Replication.Logical.Configure.html",
    ),
    ProviderRule(
        provider=Provider.CLOUDSQL, name="logical_replication", code=Code.WAL_LEVEL,
        setting="cloudsql.logical_decoding",
        says="the flag cloudsql.logical_decoding takes the place of wal_level = logical, with a restart",
        do="set the flag cloudsql.logical_decoding to on, and restart",
        fix="cloudsql.logical_decoding = on among the instance's flags, then restart",
        page=f"{_GOOGLE}/replication/configure-logical-replication",
    ),
    ProviderRule(
        provider=Provider.CLOUDSQL, name="replication_role", code=Code.SOURCE_REPLICATION,
        says="no user is a superuser; members of cloudsqlsuperuser make replication users, and publications",
        do="give REPLICATION to the role of source.dsn as such a member",
        fix="ALTER USER {role} WITH REPLICATION;  -- as a member of cloudsqlsuperuser", page=f"{_GOOGLE}/users",
    ),
    ProviderRule(
        provider=Provider.CLOUDSQL, name="failover_slots", key="source.failover",
        says="slots outlive a switchover or replica failover with PostgreSQL 17 or later, Enterprise Plus and private"
        " services access",
        do=f"{_FAILOVER}; name the DNS write endpoint in source.dsn",
        page=f"{_GOOGLE}/advanced-dr-logical-failover-slot",
    ),
    ProviderRule(
        provider=Provider.AZURE, name="logical_replication", code=Code.WAL_LEVEL,
        says="wal_level is a server parameter of the portal, and needs a restart",
        do="set wal_level to logical there, and restart", fix="wal_level = logical on the server parameters page, then"
        " restart", page=f"{_AZURE}/configure-maintain/concepts-logical",
    ),
    ProviderRule(
        provider=Provider.AZURE, name="replication_role", code=Code.SOURCE_REPLICATION,
        says="the administrator may give REPLICATION; Microsoft's advice is a separate role for replication",
        do="give REPLICATION to the role of source.dsn", fix="ALTER ROLE {role} WITH REPLICATION;  -- as the"
        " administrator", page=f"{_AZURE}/configure-maintain/concepts-logical",
    ),
    ProviderRule(
        provider=Provider.AZURE, name="failover_slots", key="source.failover",
        says="up to 16 a failover loses slots without the extension pg_failover_slots; from 17 on they are kept with"
        " sync_replication_slots and hot_standby_feedback",
        do=f"{_FAILOVER}; {_HEAL}", page=f"{_AZURE}/configure-maintain/concepts-logical",
    ),
    ProviderRule(
        provider=Provider.AZURE, name="storage", key="source.retained_wal_limit_bytes",
        says="at 95 % of storage, or with less than 5 GiB left, the server becomes read-only, and a slot that nothing"
        " reads is dropped",
        do=f"{_RETAINED}; {_HEAL}", page=f"{_AZURE}/configure-maintain/concepts-logical",
    ),
    ProviderRule(
        provider=Provider.AZURE, name="pooler", ends=_BOTH, host=":6432",
        says="port 6432 is the built-in PgBouncer, which pools transactions by default",
        do="name port 5432 in the DSN", page=f"{_AZURE}/connectivity/concepts-connection-pooling-best-practices",
    ),
    ProviderRule(
        provider=Provider.SUPABASE, name="replication_role", code=Code.SOURCE_REPLICATION,
        says="postgres, which is no superuser, may replicate; from 17 on it may give REPLICATION to other roles",
        do="use the role postgres in source.dsn, or a role that it has made with REPLICATION",
        fix="ALTER ROLE {role} WITH REPLICATION;  -- as postgres, from 17 on",
        page=f"{_SUPABASE}/replication/manual-replication-setup",
    ),
    ProviderRule(
        provider=Provider.SUPABASE, name="pooler", ends=_BOTH, host=".pooler.supabase.com",
        says="replication needs the direct connection; through a pooler, such as Supavisor, it does not work",
        do="name db.PROJECT.supabase.co, port 5432, in the DSN", page=f"{_SUPABASE}/replication/faq",
    ),
    ProviderRule(
        provider=Provider.SUPABASE, name="ipv6", ends=_BOTH,
        says="the direct connection has an IPv6 address, and an IPv4 address with the IPv4 add-on only",
        do="run parapply where IPv6 is routed, or enable the add-on",
        page=f"{_SUPABASE}/postgres/setup-replication-external",
    ),
    ProviderRule(
        provider=Provider.SUPABASE, name="read_replica", code=Code.SOURCE_STANDBY,
        says="projects with PostgreSQL 17 or later replicate from a Read Replica also",
        do="source.dsn may name such a replica", page=f"{_SUPABASE}/postgres/setup-replication-external",
    ),
    ProviderRule(
        provider=Provider.SUPABASE, name="slots", code=Code.SLOTS_EXHAUSTED,
        says="max_replication_slots, max_wal_senders and max_slot_wal_keep_size are changed by Supabase's command line",
        do="raise them there",
        fix="supabase --experimental --project-ref PROJECT postgres-config update --config max_replication_slots=...",
        page=f"{_SUPABASE}/custom-postgres-config",
    ),
    ProviderRule(
        provider=Provider.SUPABASE, name="session_replication_role", ends=(End.TARGET,), code=Code.REPLICATION_ROLE,
        key="target.session_replication_role",
        says="postgres may change session_replication_role at the level of a role",
        do="set it to replica for the role of target.dsn, or target.session_replication_role = 'origin'",
        fix="ALTER ROLE {role} SET session_replication_role TO 'replica';  -- as postgres",
        page=f"{_SUPABASE}/custom-postgres-config",
    ),
    ProviderRule(
        provider=Provider.NEON, name="logical_replication", code=Code.WAL_LEVEL,
        says="logical replication is enabled for a whole project, which restarts its computes and cannot be undone",
        do="enable it in Neon's console: Settings, Logical Replication",
        fix="enable it in Neon's console: Settings, Logical Replication", page=_NEON,
    ),
    ProviderRule(
        provider=Provider.NEON, name="replication_role", code=Code.SOURCE_REPLICATION,
        says="roles of the console, the CLI and the API have REPLICATION as members of neon_superuser; roles made by"
        " SQL cannot get it",
        do="make the role of source.dsn in the console, by the CLI or by the API",
        fix="make another role in Neon's console, by its CLI or its API", page=_NEON,
    ),
    ProviderRule(
        provider=Provider.NEON, name="inactive_slots",
        says="a slot that nothing reads is removed after about 40 hours, and the restore of a branch removes all",
        do=f"do not stop the daemon that long; {_HEAL}", page=_NEON,
    ),
    ProviderRule(
        provider=Provider.NEON, name="scale_to_zero",
        says="a compute never scales to zero while a subscriber is connected, which is paid for",
        do="`parapply drop` as soon as the slot is no longer needed", page=_NEON,
    ),
    ProviderRule(
        provider=Provider.NEON, name="slots", code=Code.SLOTS_EXHAUSTED,
        says="max_replication_slots and max_wal_senders are 10; Neon's support changes them",
        do="drop slots that nothing reads", fix="drop a slot that nothing reads, or ask Neon's support for more",
        page=_NEON,
    ),
    ProviderRule(
        provider=Provider.NEON, name="pooler", ends=_BOTH, host="-pooler.",
        says="logical replication needs a direct connection, and the pooler keeps no settings of a session",
        do="name the host without -pooler in the DSN",
        page="https://neon.com/faqs/postgres-services-wire-protocol-compatible",
    ),
)  # fmt: skip


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
    found = {each.code: each.found for each in reversed([*findings]) if each.code.value.end is place.end}
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
        if each.code in fixes and each.code.value.end is place.end
        else each
        for each in findings
    ]
