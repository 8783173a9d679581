"""One pair of databases, the stream between them, and what an operator does with it.

In go statements and commands; out come findings (`Violation`). Every action is a line of `script`, so that a failure
can be read, and done by hand.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import psycopg

from tests.fixtures import warm
from tests.fixtures.daemon import Daemon, _environment
from tests.fixtures.databases import create_end, drop_database
from tests.fixtures.route import Route
from tests.operators import oracle
from tests.operators.lab import Lab, Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.fixtures.databases import Database

#: Seconds in which a daemon that has nothing in its way moves something; else it hangs.
STILL_S = 12.0
_COMMAND_S = 60.0
_LOCK_MS = 150
_STOP_S = 40.0
#: From a start until the daemon has looked for tables that wait.
_LOOK_S = 10.0
_POLL_S = 0.02
#: Hints that are followed before it counts that they lead nowhere.
_MOST_HINTS = 20
_ALTERED = re.compile(r"a publication was altered, and .* is missing: (.*?)\. Hint: ")
_LSN = re.compile(r"parapply skip --lsn ([0-9A-F]+/[0-9A-F]+)|(?:LSN|lsn) ([0-9A-F]+/[0-9A-F]+)")
#: Hints that end in a new slot and another copy.
#: The stream lies before the present publication (15 to 17): nothing else helps.
_ANEW = re.compile(r"parapply drop.*(init|copy the tables again)|--copy --truncate|publication \S+ does not exist")
_HEAL = "`parapply heal`"
_FOREIGN_CODE = re.compile(r"target table (\S+) belongs to .*, and its code would run with the rights of")
FAST: Mapping[str, str | float] = {
    "apply.advance_interval_s": 0.05, "apply.stall_check_s": 0.2, "apply.catalogue_check_s": 0.2,
    "source.reconnect_min_s": 0.05, "source.reconnect_max_s": 0.3, "target.lease_wait_s": 15, "apply.workers": 2,
}  # fmt: skip
#: Commands that make a slot.
_COPIES = ("init", "refresh", "resume", "heal")
#: Exit codes by which a command refuses.
REFUSED = (1, 2, 3, 4, 5)


@dataclass
class Ends:
    """Two databases of an example.

    Attributes:
        source: of the publisher.
        target: of the subscriber.
    """

    source: Database
    target: Database


@dataclass
class World:
    """One stream and its operator.

    Attributes:
        lab: servers and counters.
        route: what replicates where to.
        script: what was done, a line each.
        daemon: the one that runs, if one does.
        dirty: tables that a local client wrote to here, whose rows may differ until they are copied again.
        policies: whether conflicts are settled by policies, so that none may stop the daemon.
        ddl_way: how commands come to the target: queue, automatic, hand; or not at all.
        is_tolerant: a daemon may refuse, and stays away then: the machine knows better.
        is_promised: nothing that happens here may end in a refusal.
        is_narrowed: the publication left out deletes for a time, so a key that was free again may still be taken here.
        is_altered: the publication was, or a table SET UNLOGGED, so one outside of it may refer to one in it, whose
            TRUNCATE then fails.
        publication_sql: makes the publication again where it is gone.
    """

    lab: Lab
    route: Route
    script: list[str] = field(default_factory=list)
    daemon: Daemon | None = None
    dirty: set[str] = field(default_factory=set)
    policies: bool = False
    ddl_way: str = ""
    is_tolerant: bool = False
    is_promised: bool = False
    is_altered: bool = False
    is_narrowed: bool = False
    #: Ends open transactions, which a new slot and a copy's snapshot wait for.
    quiet: Callable[[], None] = field(default=lambda: None)
    publication_sql: str = "CREATE PUBLICATION pub FOR ALL TABLES"
    _sessions: dict[str, psycopg.Connection] = field(default_factory=dict)

    @property
    def source(self) -> Database:
        """The publisher's database."""
        return self.route.source

    @property
    def target(self) -> Database:
        """The subscriber's database."""
        return self.route.target

    # Statements of applications and of operators.

    def on_source(self, text: str) -> bool:
        """Run SQL on the publisher; say whether it was accepted."""
        return self._sql("source", self.source, text)

    def on_target(self, text: str) -> bool:
        """Run SQL on the target."""
        return self._sql("target", self.target, text)

    def _sql(self, name: str, database: Database, text: str, *, is_again: bool = True) -> bool:
        self.script.append(f"{name}: {text}")
        session = self._sessions.get(name)
        if session is None or session.closed:
            # A lock that another open transaction holds is not waited for.
            session = self._sessions[name] = database.connect(options=f"-c lock_timeout={_LOCK_MS}")
            session.prepare_threshold = None
        try:
            session.execute(text.encode())
        except psycopg.Error as error:
            if session.closed and is_again:
                self.script.pop()
                return self._sql(name, database, text, is_again=False)
            if not session.closed:
                session.execute("ROLLBACK")
            self.script[-1] += f"  -- {str(error).splitlines()[0]}"
            self.lab.counts["SQL refused"] += 1
            return False
        return True

    def forget(self, side: str) -> None:
        """Close what is open to a server that stops."""
        (self.source if side == "source" else self.target).forget()
        if session := self._sessions.pop(side, None):
            session.close()

    def local(self, table: str, text: str) -> None:
        """Have a local client write to a table of the target, its partitions, children, and what refers to them."""
        if self.on_target(text):
            query = (
                "WITH RECURSIVE below AS (SELECT inhparent AS o, inhrelid AS p FROM pg_inherits"
                " UNION SELECT confrelid, conrelid FROM pg_constraint WHERE contype = 'f'),"
                " t AS (SELECT to_regclass('{0}')::oid AS o UNION SELECT below.p FROM below, t WHERE below.o = t.o)"
                " SELECT relname FROM pg_class, t WHERE pg_class.oid = t.o"
            )
            self.dirty.update(name for (name,) in self.target.rows(query.format(table)))

    # Commands.

    def command(
        self, *words: str, environ: Mapping[str, str] | None = None, is_quiet: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; a traceback or a refusal without words is a violation.

        Args:
            words: the command and its options.
            environ: further variables.
            is_quiet: end what applications have in hand before a slot is made, which would wait for them.
        """
        name, *options = words
        tail = " ".join(options)
        env = "".join(f"{key}={value} " for key, value in (environ or {}).items())
        self.script.append(f"$ {env}parapply {name} {tail}".rstrip())
        if name in _COPIES and is_quiet:
            self.quiet()
        try:
            done = warm.run([*name.split(), *self.route.arguments(), *options], _environment(environ), _COMMAND_S)
        except subprocess.TimeoutExpired:
            log = self.daemon.log_tail() if self.daemon else "no daemon"
            raise Violation(f"parapply {name} does not end within {_COMMAND_S:g} s\n{log}") from None
        self.script[-1] += f"  -> {done.returncode}"
        self.lab.counts[f"parapply {name}"] += 1
        self._judge_words(name, done)
        if found := _ALTERED.search(done.stdout):
            self._was_altered(found[1])
        return done

    def _was_altered(self, names: str) -> None:
        """Take tables for unequal whose publication was altered and altered back, as the warning says."""
        self.dirty.update([name.rpartition(".")[2] for name in names.split(", ")])

    def _hear(self) -> None:
        """Take note of what the daemon has warned of."""
        for event in self.daemon.events_of("publication_altered") if self.daemon else ():
            self._was_altered(str(event["relation"]))

    def _judge_words(self, name: str, done: subprocess.CompletedProcess[str]) -> None:
        said = done.stderr.strip()
        if "Traceback" in said:
            raise Violation(f"parapply {name} ended with a traceback:\n{said}")
        if done.returncode == 0 or done.returncode < 0:
            return
        self.script[-1] += f" {said.splitlines()[-1][:300] if said else '(nothing said)'}"
        self.lab.counts["refusals"] += 1
        if done.returncode not in REFUSED or not (said or done.stdout.strip()):
            raise Violation(f"parapply {name} ended with {done.returncode} and said: {said!r}")

    def beside(self, words: Sequence[str], point: str, action: Callable[[], object]) -> int:
        """Hold a command at a point, do something, and let it go on; return its exit code."""
        if words[0] in _COPIES:
            self.quiet()
        with TemporaryDirectory() as folder, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            Path(folder).chmod(0o777)
            armed = {"PARAPPLY_FAILPOINT": f"{point}:hold", "PARAPPLY_FAILPOINT_DIR": folder}
            self.script.append(f"$ parapply {' '.join(words)} &  # held at {point}")
            arguments = [words[0], *self.route.arguments(), *words[1:]]
            process = warm.start(arguments, _environment(armed), (None, os.dup(out.fileno()), os.dup(err.fileno())))
            held, deadline_s = Path(folder) / f"{point}.held", time.monotonic() + _COMMAND_S
            try:
                while not held.exists() and process.poll() is None and time.monotonic() < deadline_s:
                    time.sleep(_POLL_S)
                action()
                held.unlink(missing_ok=True)
                code = process.wait(_COMMAND_S)
            except subprocess.TimeoutExpired:
                raise Violation(f"parapply {words[0]} does not end within {_COMMAND_S:g} s") from None
            finally:
                process.kill()
            out.seek(0)
            err.seek(0)
            done = subprocess.CompletedProcess(arguments, code, out.read().decode(), err.read().decode())
        self.script.append(f"# {words[0]} goes on and ends with {code}")
        self.lab.counts[f"parapply {words[0]}"] += 1
        self._judge_words(words[0], done)
        return code

    def status(self) -> dict[str, Any]:
        """Return what `status --json` says."""
        done = self.command("status", "--json")
        if done.returncode:
            raise Violation(f"status was refused: {done.stderr}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    # The daemon.

    def start(self, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        """Start the daemon, if none runs."""
        if self.daemon is not None:
            return
        self.script.append(f"$ parapply run {' '.join(arguments)} &".replace("  ", " "))
        self.daemon = Daemon(self.route, *arguments, environ=environ)
        self.lab.counts["parapply run"] += 1

    def runs(self) -> bool:
        """Return whether the daemon that was started still runs."""
        return self.daemon is not None and self.daemon.is_running()

    def stop(self) -> None:
        """Ask the daemon for its end."""
        daemon = self.daemon
        if daemon is None:
            return
        self.script.append("# SIGTERM")
        if not daemon.is_running():
            self.ended()
            return
        daemon.send(15)  # type: ignore[arg-type]
        if daemon.runs_for(_STOP_S):
            daemon.end()
            self.daemon = None
            raise Violation(f"the daemon did not end after SIGTERM:\n{daemon.log_tail()}")
        self.ended()

    def kill(self) -> None:
        """Kill the daemon."""
        if self.daemon is None:
            return
        self.script.append("# SIGKILL")
        self.lab.counts["kills"] += 1
        self.daemon.end()
        self._hear()
        self.daemon = None

    def ended(self) -> str:
        """Take note of a daemon that has ended, and do what its hint says; return the line that it ended with."""
        self._hear()
        daemon, self.daemon = self.daemon, None
        assert daemon is not None
        code = daemon.exit_code()
        is_told = bool(daemon.events_of("daemon_failed"))
        line = daemon.failure if is_told else next((one for one in reversed(daemon.lines) if one.strip()), "")
        if code in {0, -9, -15}:
            self.lab.counts["kills"] += code == -9
            return ""
        self.script.append(f"# the daemon ended with {code}: {line[:400]}")
        self.lab.counts["daemon refused"] += 1
        if code not in REFUSED or "Traceback" in "\n".join(daemon.lines):
            raise Violation(f"the daemon ended with {code}:\n{daemon.log_tail()}")
        self.follow(code, line)
        return line

    def follow(self, code: int, line: str) -> None:
        """Do what the hint of a refusal says; one that cannot be followed is a violation."""
        is_too_early = code == 2 and "name a later time" in line  # of --until
        if self.is_tolerant or is_too_early:
            return
        if self.is_promised:
            raise Violation(f"the daemon goes on here, as is promised, and was refused: {line}")
        if code == 5:
            self._pass_conflict(line)
        elif _HEAL in line:
            self.kill()
            if self.command("heal").returncode:
                self.again()
        elif _ANEW.search(line):
            self.again()
        elif self.trust(line):
            pass
        elif "`parapply refresh`" in line or "refresh --table" in line:
            self.renew()
        elif re.search(r"(again later|run the same command again|CREATE PUBLICATION)", line):
            self.on_source(self.publication_sql)
        else:
            raise Violation(f"a refusal without a hint that can be followed (exit {code}): {line}")

    def trust(self, said: str) -> bool:
        """Give a table to the role that applies, with its partitions, if a refusal asks for it."""
        found = _FOREIGN_CODE.search(said)
        return found is not None and self.on_target(
            "DO $$ DECLARE one regclass; BEGIN"
            f" FOR one IN SELECT '{found[1]}'::regclass UNION SELECT relid FROM pg_partition_tree('{found[1]}') LOOP"
            " EXECUTE format('ALTER TABLE %s OWNER TO CURRENT_USER', one); END LOOP; END $$"
        )

    def _pass_conflict(self, line: str) -> None:
        """Skip the transaction that stopped the daemon, where a local client is the cause."""
        kept = self.command("conflicts list", "--json")
        self.lab.counts["conflicts"] += 1
        is_referred = self.is_altered and "truncate on" in line and "feature_not_supported" in line
        is_taken = self.is_narrowed and "unique_violation" in line
        if not self.dirty and not is_referred and not is_taken:
            raise Violation(f"no local client wrote here, and the daemon stopped: {line}")
        if self.policies:
            raise Violation(f"policies settle each conflict, and the daemon stopped: {line}\n{kept.stdout}")
        found = _LSN.search(line)
        if not found or (kept.returncode == 0 and kept.stdout.strip() in {"", "[]"} and not is_referred):
            raise Violation(f"a conflict that is not counted, or not named: {line}\n{kept.stdout}{kept.stderr}")
        self.dirty.update(self.published())
        done = self.command("skip", "--lsn", found[1] or found[2])
        if done.returncode:
            raise Violation(f"the transaction that is named cannot be skipped: {done.stderr}")

    def again(self) -> None:
        """Drop the slot and its state, and begin again with a copy."""
        self.kill()
        done = self.command("drop", "--yes")
        if done.returncode == 0:
            done = self._init_again()
        if done.returncode and "no publication" in done.stderr:
            self.on_source(self.publication_sql)
            done = self._init_again()
        if done.returncode and self.trust(done.stderr):
            done = self._init_again()
        if done.returncode:
            raise Violation(f"`drop`, then `init --copy --truncate` is refused: {done.stderr}")
        self.dirty.clear()

    def _init_again(self) -> subprocess.CompletedProcess[str]:
        if self.ddl_way not in {"queue", "automatic"}:
            return self.init("--truncate")
        # Commands of the queue that did not run here leave objects that differ, also where they renamed the schema.
        self.on_target("DROP SCHEMA IF EXISTS public CASCADE; CREATE SCHEMA public")
        program = self.source.server.program("pg_dump")  # type: ignore[union-attr]
        return self.init("--schema", "--pg-dump", str(program))

    def init(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Make the slot and copy."""
        # A parallel copy knows no order of foreign keys.
        done = self.command("init", "--copy", "--set", "target.session_replication_role=replica", *options)
        if done.returncode == 0 and self.ddl_way in {"queue", "automatic"}:
            self.command("init", "--ddl" if self.ddl_way == "queue" else "--ddl=automatic")
        return done

    # Checks.

    def published(self) -> list[str]:
        """Return the names of the published tables."""
        return [one.name for one in oracle.published(self.source, self.route.publication)]

    def told(self) -> dict[str, str]:
        """Return tables that the product says are not applied, with the state.

        A root that came back to the publication, or is published by its own name now, is named by its partitions; one
        that waits, and is not published by its own name any more, stands for them.
        """
        states = oracle.states(self.target, self.route.slot)
        told = {name: state for name, state in states.items() if state != "copied"}
        told = {leaf: told[root] for leaf, root in oracle.below(self.source, told).items()} | told
        below = oracle.below_roots(self.source, self.route.publication) if told else {}
        return told | {root: told[name] for name, root in below.items() if name in told and root not in states}

    def settle(self, *, still_s: float = STILL_S) -> bool:
        """Wait until the target has all of the publisher; say whether the daemon still runs.

        Raises:
            Violation: nothing moves, and the daemon does not end.
        """
        daemon = self.daemon
        if daemon is None:
            return False
        lsn = self.route.end_of_source_lsn()
        query = (
            "SELECT lowest_remote_lsn >= %s::pg_lsn, (lowest_remote_lsn, highest_remote_lsn)::text"
            " FROM parapply.progress WHERE slot_name = %s"
        )
        before, since_s = "", time.monotonic()
        while True:
            row: Any = None
            with _quiet(psycopg.Error), self.target.session() as session:
                row = session.execute(query.encode(), [lsn, self.route.slot]).fetchone()
            # A publisher that was put back is behind what the target has: its daemon has to have seen it.
            if row and row[0] and daemon.events_of("source_connected") and daemon.is_running():
                return True
            if not daemon.is_running():
                self.ended()
                return False
            now = str(row)
            if now != before:
                before, since_s = now, time.monotonic()
            elif time.monotonic() - since_s > still_s:
                seen = self.status()
                if seen["state"] == "reconnecting" and _ANEW.search(seen["reason"]):
                    self.script.append(f"# reconnecting: {seen['reason']}")
                    self.again()
                    return False
                daemon.send(10)  # type: ignore[arg-type]
                raise Violation(f"nothing moves for {still_s:g} s: {now}; {self._state()}\n{daemon.log_tail()}")
            time.sleep(_POLL_S)

    def _state(self) -> str:
        seen = self.status()
        prepared = self.target.rows("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
        workers = [(one["state"], one["waits_for"]) for one in seen["workers"]]
        return f"status: {seen['state']}, {seen['reason']!r}, lag {seen['lag_bytes']}, {workers}, prepared {prepared}"

    def silent(self) -> dict[str, str]:
        """Return published tables that differ although nothing says so, with what differs."""
        differing = oracle.differences(self.source, self.target, self.route.publication)
        if not differing:
            return {}
        told = self.told()
        return {name: what for name, what in differing.items() if name not in told and name not in self.dirty}

    def check(self) -> None:
        """Both sides are equal as far as they should be, or the product says which tables are not.

        The daemon looks for such tables when it starts and once a minute; so one that is silent is started again.
        """
        if self.daemon is None or not self.settle():
            return
        self._check_prepared()
        found = self._wrong()
        if not found:
            return
        self.script.append(f"# differs: {', '.join(found)}")
        self.stop()
        self.start()
        if not self.settle():
            return
        deadline_s = time.monotonic() + _LOOK_S
        while (found := self._wrong()) and time.monotonic() < deadline_s:
            if not self.runs():
                self.ended()
                return
            time.sleep(_POLL_S)
        if found:
            what = "\n".join(f"{name}: {one}" for name, one in found.items())
            raise Violation(f"not equal, and nothing says so ({self._state()}):\n{what}")

    def _wrong(self) -> dict[str, str]:
        """Return tables that differ although nothing says so, and partitions that wait although their root is applied.

        One that was detached waits rightly; attached again, it waits with its root, until both are copied.
        """
        self._hear()
        told = self.told()
        below = oracle.below_roots(self.source, self.route.publication) if told else {}
        needless = {name: f"waits, and {root} is applied" for name, root in below.items() if name in told}
        return self.silent() | {name: what for name, what in needless.items() if below[name] not in told}

    def _check_prepared(self) -> None:
        """Nothing is prepared on the target that the publisher has decided."""
        if "source.two_phase" not in self.route.settings:
            return
        query = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
        deadline_s = time.monotonic() + _LOOK_S
        while self.target.rows(query) > self.source.rows(query):
            if time.monotonic() > deadline_s:
                raise Violation(f"prepared here, and decided on the publisher: {self._state()}")
            time.sleep(_POLL_S)

    def renew(self) -> None:
        """Copy again what waits, is paused, or was written to by local clients, as the hints say."""
        told = self.told()
        published = set(self.published())
        for name in sorted(self.dirty & published):
            told.setdefault(name, "dirty")
        for name, state in sorted(told.items()):
            if name not in published:
                continue
            words = ["resume", f"public.{name}"] if state == "paused" else ["refresh", "--table", f"public.{name}"]
            done = self.command(*words, *(["--truncate"] if state == "dirty" else []))
            if done.returncode and self.trust(done.stderr):
                done = self.command(*words)
            if done.returncode and "--truncate" in done.stderr:
                done = self.command(*words, "--truncate")
            if done.returncode and (_HEAL in done.stderr or _ANEW.search(done.stderr)):
                self.again()
                return
            if done.returncode == 0:
                self.dirty.discard(name)

    def finish(self, heal: Callable[[], None]) -> None:
        """End the example: all hints are followed, both sides are equal, and `drop` leaves nothing.

        Args:
            heal: ends what an application has in hand, and gives back what the publication needs.
        """
        self.script.append("# the end")
        heal()
        for _ in range(_MOST_HINTS):
            self.start()
            if not self.settle():
                continue
            self.check()
            if self.daemon is None:
                continue
            if self._left():
                self.renew()
            elif self._is_well():
                break
        else:
            raise Violation(f"the hints lead nowhere: {self._left() or 'the daemon does not run'}")
        self.stop()
        done = self.command("drop", "--yes")
        if done.returncode:
            raise Violation(f"drop is refused: {done.stderr}")
        deadline_s = time.monotonic() + STILL_S
        # A session ends a moment after its client.
        while left := oracle.left_behind(self.source, self.target):
            if time.monotonic() > deadline_s:
                raise Violation(f"drop leaves {left}")
            time.sleep(_POLL_S)

    def _left(self) -> str:
        differing = oracle.differences(self.source, self.target, self.route.publication)
        told = {name: state for name, state in self.told().items() if name in set(self.published())}
        return "" if not differing and not told else f"{told} {differing}"

    def _is_well(self) -> bool:
        """Return whether the daemon runs on, which status must also say soon."""
        deadline_s = time.monotonic() + STILL_S
        while True:
            seen = self.status()
            if not self.runs():
                self.ended()
                return False
            if seen["state"] == "running" and seen["is_daemon_connected"]:
                return True
            if time.monotonic() > deadline_s:
                raise Violation(f"a daemon runs and all is equal, and status says: {seen['state']} {seen['reason']}")
            time.sleep(_POLL_S * 10)

    def close(self) -> None:
        """Remove all of it."""
        if self.daemon is not None:
            self.daemon.end()
            self.daemon = None
        for session in self._sessions.values():
            session.close()
        for database in (self.target, self.source):
            drop_database(database)


class _quiet:  # noqa: N801  as contextlib names its own
    """Let errors of a class pass."""

    def __init__(self, kind: type[BaseException]) -> None:
        """Keep the class."""
        self._kind = kind

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """Return whether the error is of the class."""
        return kind is not None and issubclass(kind, self._kind)


def make_world(
    lab: Lab, majors: tuple[int, int], *, settings: Mapping[str, str | float] | None = None, slot: str = "app"
) -> World:
    """Return a pair of fresh databases."""
    source = create_end(lab.server("source", majors[0]), "source")
    target = create_end(lab.server("target", majors[1]), "target")
    route = Route(
        source=source, target=target, settings={**FAST, **(settings or {})}, source_dsn=source.dsn,
        target_dsn=target.dsn, slot=f"{slot}_{source.dbname[-8:]}",
    )  # fmt: skip
    return World(lab=lab, route=route, script=[f"# PostgreSQL {majors[0]} to {majors[1]}; {dict(settings or {})}"])


def both(world: World, statements: Sequence[str]) -> None:
    """Run statements on both sides."""
    for text in statements:
        world.on_source(text)
        world.on_target(text)
