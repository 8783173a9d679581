"""The meaning of each code: end, severity, reason and advice. Pure data.

`is_arguable` marks refusals that concern the stream and not `init` itself: the operator may mend them after `init` and
before the first change that they concern, or knows that they do not hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

import msgspec

from parapply import sharing
from parapply.config_fleet import CONTROL_CONNECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable


class Severity(StrEnum):
    """The effect of a finding on `init`, the copy and the stream; worst first."""

    REFUSED = "refused"  # one of them would fail
    WARNING = "warning"  # one of them would hurt, or would fail with certain rows
    NOTE = "note"  # worth knowing


class End(StrEnum):
    """Where something was found."""

    SOURCE = "source"
    TARGET = "target"
    DAEMON = "daemon"  # on the machine that runs this command


# Never equal, because two codes may have the same words.
@dataclass(frozen=True, eq=False)
class Kind:
    """Facts that all findings of one code share."""

    end: End
    severity: Severity
    why: str  # it matters; one sentence
    advice: str  # what to do; one sentence
    is_arguable: bool = False


_S, _T, _D = End.SOURCE, End.TARGET, End.DAEMON
_REFUSED, _WARNING, _NOTE = Severity.REFUSED, Severity.WARNING, Severity.NOTE

_STRICTER = (
    "a row that the publisher accepts can be refused here, which stops the stream",
    "drop the constraint, or have it on the publisher too",
)


# fmt: off
class Code(Enum):
    """The kinds of findings, in the order in which they are shown within a severity."""

    REPLICA_IDENTITY = Kind(
        _S, _WARNING,
        "while such a table is published, every UPDATE and DELETE of it fails ON THE PUBLISHER ('does not have a"
        " replica identity and publishes updates'), so that the publication breaks the application itself",
        "before the publication is made, or at once: add a primary key, name a unique index as the replica identity, or"
        " use FULL; or publish inserts only, or leave the table out",
    )
    FILTER_OUTSIDE_IDENTITY = Kind(
        _S, _WARNING,
        "every UPDATE and DELETE of the table fails ON THE PUBLISHER, because the row filter reads a column that is not"
        " part of the replica identity",
        "filter by columns of the replica identity, or use REPLICA IDENTITY FULL",
    )
    COLUMNS_OUTSIDE_IDENTITY = Kind(
        _S, _WARNING,
        "every UPDATE and DELETE of the table fails ON THE PUBLISHER, because the publication's column list leaves"
        " out a column of the replica identity",
        "add the columns of the replica identity to the column list",
    )
    WAL_LEVEL = Kind(
        _S, _REFUSED, "no logical slot can be made", "set wal_level = logical on the publisher and restart it"
    )
    SOURCE_STANDBY = Kind(
        _S, _REFUSED, "a standby decodes WAL from PostgreSQL 16 on only", "point source.dsn to the primary"
    )
    STANDBY_FEEDBACK = Kind(
        _S, _WARNING,
        "vacuum on the primary takes catalogue rows that the slot on the standby needs, which loses the slot",
        "set it on the standby, which also needs its own physical slot on the primary (primary_slot_name)",
    )
    SOURCE_VERSION = Kind(
        _S, _WARNING, "parapply is tested with PostgreSQL 15 to 18", "try it on a copy first, and run `parapply verify`"
    )
    STREAM_OPTIONS = Kind(
        _S, _REFUSED, "START_REPLICATION would be refused", "change the setting, or use a newer publisher"
    )
    SOURCE_REPLICATION = Kind(
        _S, _REFUSED, "only a role with REPLICATION makes and reads a slot", "give it to the role; psql as a superuser"
    )
    SOURCE_SELECT = Kind(
        _S, _REFUSED, "the copy reads the published tables (streaming does not)",
        "grant it: config/roles/publisher.sql does for all tables",
    )
    SOURCE_CONNECTIONS = Kind(
        _S, _REFUSED, "the daemon has one plain session on the publisher, and the copy has --connections of them",
        "raise max_connections or the limit of the role or database, or copy over fewer connections", is_arguable=True,
    )
    SLOTS_EXHAUSTED = Kind(
        _S, _REFUSED, "no further slot can be made",
        "drop a slot that nothing reads, or raise max_replication_slots and restart the publisher",
    )
    WAL_SENDERS_EXHAUSTED = Kind(
        _S, _REFUSED, "the stream and the copy's snapshot each need a WAL sender",
        "raise max_wal_senders and restart the publisher", is_arguable=True,
    )
    SLOT_REFUSED = Kind(
        _S, _REFUSED, "the stream could not continue exactly where the target is",
        "correct source.slot or source.dsn, or start again with a copy",
    )
    SLOT_READ = Kind(
        _T, _REFUSED, "its reader has confirmed changes that do not come again, and this target may lack them",
        "correct target.dsn, bring the target back with its state schema, or `parapply drop` and `init --copy`; after a"
        " subscription the target may have all that was confirmed", is_arguable=True,
    )
    SLOT_IN_USE = Kind(
        _S, _WARNING, "a slot has one reader at a time: the daemon would wait for the other one to end",
        "stop the other reader, or choose another source.slot",
    )
    SLOT_ADOPTED = Kind(
        _S, _NOTE, "`init` makes no slot then but takes the existing one, from its position on",
        "make sure that the target holds what came before that position",
    )
    OPEN_TRANSACTION = Kind(
        _S, _WARNING,
        "making a slot waits until every transaction that is open on the publisher has ended, in any database and"
        " prepared ones too; until then `init` waits",
        "end it, or wait for it",
    )
    WAL_SENDER_TIMEOUT = Kind(
        _S, _WARNING, "the publisher cuts the stream off when the daemon is silent that long, also in one long pause",
        "use PostgreSQL's default of 60 s",
    )
    IDLE_SLOT_TIMEOUT = Kind(
        _S, _WARNING, "the publisher invalidates the slot when the daemon was down that long: it takes a heal",
        "make it longer than the daemon may ever be down, or 0",
    )
    WAL_RETENTION = Kind(
        _S, _NOTE, "while the daemon is down or late, the publisher keeps WAL for the slot",
        "watch the lag and the disk of pg_wal; without a limit WAL can fill the disk, with one the slot can be lost",
    )
    DECODING_SPILL = Kind(
        _S, _NOTE, "transactions that are larger than that are written to the publisher's disk while they are decoded",
        "leave source.streaming at auto, or raise the setting",
    )
    PUBLICATION_MISSING = Kind(_S, _REFUSED, "nothing would be sent", "make it, or correct source.publications")
    PUBLICATION_REFUSED = Kind(
        _S, _REFUSED, "the publisher refuses such a stream", "give the publications of one table the same column list"
    )
    PUBLICATION_EMPTY = Kind(_S, _WARNING, "nothing is sent", "ALTER PUBLICATION ... ADD TABLE")
    PUBLICATION_OPERATIONS = Kind(
        _S, _NOTE, "the two sides differ after the first change of another kind",
        "ALTER PUBLICATION ... SET (publish = 'insert, update, delete, truncate')",
    )
    STATE_PUBLISHED = Kind(
        _S, _WARNING,
        "it is the progress of a parapply that applies, or applied, on the publisher; copy and stream leave it out, and"
        " still it is decoded and sent several times a second",
        "publish the other tables or schemas by name (docs/CONFLICTS.md, two-way replication)",
    )
    DDL_QUEUE = Kind(
        _S, _WARNING,
        "commands that run on the publisher would not run on the target, whose tables then miss what they have made",
        "`parapply init --ddl` makes and publishes the queue, ddl.apply = true has its commands run; or have neither",
    )
    TARGET_READ_ONLY = Kind(_T, _REFUSED, "nothing can be applied there", "point target.dsn to the primary")
    TARGET_POOLER = Kind(
        _T, _REFUSED, "locks and settings must last as long as the session", "connect to the PostgreSQL server itself"
    )
    TARGET_VERSION = Kind(
        _T, _WARNING, "parapply is tested with PostgreSQL 15 to 18", "try it on a copy first, and run `parapply verify`"
    )
    REPLICATION_ROLE = Kind(
        _T, _REFUSED, "without it triggers, rules and foreign keys of the target would act on applied rows",
        "grant it, or set target.session_replication_role = 'origin' if they shall act",
    )
    STATE_SCHEMA = Kind(
        _T, _REFUSED, "`init` makes the schema that holds the progress, and the daemon writes to it",
        "grant it: config/roles/subscriber.sql does",
    )
    TWO_PHASE = Kind(
        _T, _REFUSED, "prepared transactions could not be applied",
        "set max_prepared_transactions on the target and restart it, or set source.two_phase = false",
    )
    TWO_PHASE_FEWER = Kind(
        _T, _WARNING, "the publisher can have more prepared transactions than the target can hold; the stream would"
        " wait",
        "set max_prepared_transactions on the target to at least the publisher's, and restart it",
    )
    HEAL_SELECT = Kind(
        _S, _WARNING, 'source.on_lost_slot is "heal", and a heal reads the published tables',
        "grant it: config/roles/publisher.sql does for all tables",
    )
    HEAL_TEMPORARY = Kind(
        _T, _WARNING, 'source.on_lost_slot is "heal", and a heal brings rows through temporary tables',
        "grant it, or the daemon stops where the slot is lost",
    )
    TARGET_CONNECTIONS = Kind(
        _T, _REFUSED, f"the daemon opens apply.workers + {CONTROL_CONNECTIONS} sessions",
        "raise max_connections or the limit of the role or database, or lower apply.workers", is_arguable=True,
    )
    ORIGINS_NEEDED = Kind(
        _T, _REFUSED, "it must be known which rows the daemon wrote, so the daemon ends at once",
        "grant or allow them, choose another policy, or source.origin = 'any' if nothing replicates back",
        is_arguable=True,
    )
    ORIGINS_MISSING = Kind(
        _T, _WARNING, "changes that are applied look like local ones: in a two-way set-up they go round",
        "grant them: config/roles/subscriber.sql does",
    )
    ORIGINS_EXHAUSTED = Kind(
        _T, _WARNING, "each worker has a replication origin; without one it works, but changes look like local ones",
        "raise it above the number of all workers of all daemons and restart the target",
    )
    DDL_ROLE = Kind(
        _T, _REFUSED, "commands of the publisher run as this role, so the daemon ends at once",
        "make it, and the daemon's role a member of it, or correct ddl.role", is_arguable=True,
    )
    CUT_OVER = Kind(
        _T, _REFUSED, "the daemon applies nothing from the fence on",
        "go on with it, or take it back",
    )
    PREPARED_PENDING = Kind(
        _T, _REFUSED, "their outcome comes through the slot, so the daemon ends at once", "set source.two_phase = true"
    )
    COMMIT_TIMESTAMPS = Kind(
        _T, _REFUSED, "the policy compares commit times, or asks who wrote a row",
        "set track_commit_timestamp = on and restart the target, or choose another policy", is_arguable=True,
    )
    ENCODING = Kind(
        _T, _WARNING, "a character that the target's encoding does not have stops the stream",
        "make the target's database with the publisher's encoding; in SQL_ASCII correct what is no UTF8",
    )
    COLLATION_VERSION = Kind(
        _T, _WARNING,
        "the operating system or ICU sorts differently now than when the indexes were made: a lookup by key can miss an"
        " existing row",
        "rebuild the indexes, then record the version",
    )
    LOCALE = Kind(
        _T, _NOTE, "values are the same on both ends, but their order, their case and what defaults print may differ",
        "intended, or make the target's database with the publisher's locale",
    )
    EXTENSION_MISSING = Kind(
        _T, _REFUSED, "a published column has a type of this extension", "create it on the target", is_arguable=True
    )
    EXTENSION_VERSION = Kind(
        _T, _NOTE, "a published column has a type of this extension, whose text form could differ",
        "use the same version on both ends",
    )
    TABLE_MISSING = Kind(
        _T, _REFUSED, "the stream stops at the table's first change, and the copy is refused",
        "create it (`pg_dump --schema-only` of the publisher, or `init --copy --schema`), or take it out of the"
        " publication",
        is_arguable=True,
    )
    TABLE_REFUSED = Kind(
        _T, _REFUSED, "the stream stops at the relation's first change",
        "replicate into an ordinary table of that name, or leave the table out of the publication", is_arguable=True,
    )
    COLUMNS_REFUSED = Kind(
        _T, _REFUSED, "the stream stops at the table's first change, and the copy is refused",
        "alter the target table, or leave the columns out of the publication's column list", is_arguable=True,
    )
    OWNER_CODE = Kind(
        _T, _REFUSED, "code of the table's owner would run with the rights of the role that applies, so the stream"
        " stops at the table's first change, and the copy is refused",
        "apply as the table's owner, or give the table to a role that you trust; target.apply_as = 'role' lets the"
        " code of every owner run", is_arguable=True,
    )
    UPDATES_REFUSED = Kind(
        _T, _REFUSED, "the stream stops at the first UPDATE or DELETE of the table",
        "give both tables the same key, or use REPLICA IDENTITY FULL on the publisher", is_arguable=True,
    )
    TABLE_ACCESS = Kind(
        _T, _REFUSED, "the stream stops at the table's first change",
        "grant what is missing: config/roles/subscriber.sql does", is_arguable=True,
    )
    COLUMN_UNFILLED = Kind(
        _T, _REFUSED, "every INSERT of the table fails: the column is NOT NULL, gets no value from the publisher,"
        " and has no default", "give it a default, or allow NULL", is_arguable=True,
    )
    ROWS_THERE = Kind(
        _T, _REFUSED, "the copy would bring the publisher's rows in addition",
        "empty them, or give --truncate, which does; `init` without --copy leaves them as they are",
    )
    ROWS_EMPTIED = Kind(
        _T, _WARNING, "--truncate deletes them before the copy", "make sure that they are no longer needed"
    )
    ENUM_LABELS = Kind(
        _T, _WARNING, "a row with such a label stops the stream or the copy", "add the labels on the target"
    )
    GENERATED_ON_SOURCE = Kind(
        _T, _WARNING, "the publisher does not send the column, so it stays NULL or has its default on the target",
        "generate it on the target too, or (18) publish it with publish_generated_columns",
    )
    TYPE_DIFFERS = Kind(
        _T, _WARNING, "values travel as text: one that the target's type does not read stops the stream, and one"
        " that it rounds or cuts makes the two sides differ", "use the publisher's type",
    )
    NOT_NULL = Kind(_T, _WARNING, *_STRICTER)
    CONSTRAINT = Kind(_T, _WARNING, *_STRICTER)  # noqa: PIE796  never equal
    UNIQUE = Kind(
        _T, _WARNING, "a row that the publisher accepts can be refused here, which is a conflict",
        "drop the index, have it on the publisher too, or set a policy in [conflict]",
    )
    FOREIGN_KEY = Kind(
        _T, _WARNING, "it is enforced in the daemon's sessions: a row whose parent is not replicated stops the stream",
        "drop it, have it on the publisher too, or do not enforce it for the replica role",
    )
    CODE_RUNS = Kind(
        _T, _WARNING, "it can see the order of changes, so each transaction with the table is applied alone, row by"
        " row",
        "disable it for the replica role if it must not run; if its order does not matter, say so in the configuration",
    )
    NO_KEY = Kind(
        _T, _WARNING, "each updated or deleted row is searched by all its columns, and batches follow one another",
        "give the table a primary key on both ends, or the target an index that narrows the search",
    )
    NOT_SET_BASED = Kind(
        _T, _NOTE, "the table is applied, but not in the fastest way", "the reason says what is in the way"
    )
    TYPE_WIDER = Kind(
        _T, _NOTE, "the target's type takes every value; as a key it may be applied more slowly",
        "intended, or align them"
    )
    COLLATION_DIFFERS = Kind(
        _T, _NOTE, "values are the same, but their order differs, and a nondeterministic collation holds different"
        " texts equal", "intended, or align them",
    )
    FOREIGN_KEY_UNCHECKED = Kind(
        _T, _NOTE, "the daemon's sessions do not check it, so a parent that is not replicated is not missed",
        "publish the parent table too, or drop it",
    )
    IDENTITY_ALWAYS = Kind(
        _T, _NOTE, "inserts work (OVERRIDING SYSTEM VALUE), but an UPDATE that changes the column cannot be applied",
        "if the publisher changes such values: make it BY DEFAULT on the target",
    )
    NOT_REPLICATED = Kind(_S, _NOTE, "logical replication does not carry it", "bring it over by hand")
    TABLE_UNPUBLISHED = Kind(
        _S, _NOTE, "changes of these tables do not come", "intended, or ALTER PUBLICATION ... ADD TABLE"
    )
    SEQUENCES = Kind(
        _S, _NOTE, "their values are not in the stream: after a cut-over the target would give numbers that are taken",
        "`parapply sequences` at the cut-over",
    )
    SEQUENCES_PUBLISHED = Kind(
        _S, _NOTE, "no stream carries sequences: a built-in subscription asks for their values, and parapply does so by"
        " their names", "`parapply sequences` at the cut-over, or sequences.interval_s",
    )
    LARGE_OBJECTS = Kind(
        _S, _NOTE, "logical replication does not carry them; columns that hold their OIDs lead nowhere on the target",
        "move them with pg_dump --large-objects, or keep the data in bytea columns",
    )
    SPILL_DIR = Kind(
        _D, _REFUSED, "the daemon keeps large transactions there until they commit", "make it, or set apply.spill_dir",
        is_arguable=True,
    )
    SETTING_WITHOUT_TABLE = Kind(
        _D, _WARNING, "the setting has no effect, and the table that it was meant for has the common one",
        "correct the name, or publish the table; a partition that is published separately has its own name",
    )
    TABLE_SHARED = Kind(
        _T, _REFUSED,
        "a TRUNCATE on the publisher would also delete the other slot's rows, and changes could find them",
        sharing.HINT,
    )
    SCHEMA_ONLY = Kind(
        _S, _NOTE, "mapping.schema_only leaves the table's rows out of copy, stream and verify",
        "intended, or take it out of mapping.schema_only",
    )
    REPLACED_UNKNOWN = Kind(
        _D, _REFUSED, "the rows of the table that the name was meant for would come as they are",
        "correct the name in [mapping]; a partition that is published separately has its own name",
    )
    REPLACE_REFUSED = Kind(
        _T, _REFUSED, "the stream stops before the table's first change, and the copy is refused",
        "correct `replace` in [mapping]: an IMMUTABLE expression of published columns, for a column by which no row is"
        " found or compared",
    )
    COLUMN_REPLACED = Kind(
        _T, _NOTE, "mapping replaces the column's values on the target; files of the daemon hold the publisher's",
        "intended, or take it out of `replace`",
    )
    SCHEMA_ONLY_UNKNOWN = Kind(
        _D, _REFUSED, "the rows of the table that the name was meant for would be copied and applied",
        "correct the name in mapping.schema_only, or take it out",
    )
    SPILL_SPACE = Kind(
        _D, _WARNING, "a large transaction can fill the disk of the daemon's machine before it reaches its limit",
        "make room, or lower apply.spill_limit_bytes",
    )

    @property
    def text(self) -> str:
        """Return the code as people and programs read it."""
        return self.name.lower()
# fmt: on


class Finding(msgspec.Struct, frozen=True):
    """One thing that was found."""

    code: Code
    found: str  # the fact, in one sentence without its stop; names are quoted and have their schema
    object: str = ""  # quoted name of the table, type or role; empty if it is about the server
    fix: str = ""  # SQL or setting for exactly this one; empty where the kind's advice says all


def by_code(findings: Iterable[Finding]) -> dict[Code, list[Finding]]:
    """Return the findings of each code, in their order."""
    groups: dict[Code, list[Finding]] = {}
    for each in findings:
        groups.setdefault(each.code, []).append(each)
    return groups
