"""The package's unit under a systemd of its own: start, confinement, reload, crash, hang, refusal, upgrade, removal.

``python -m tests.packaging.debian --unit PACKAGE.deb`` calls it. Both databases are on one server of that Debian.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

from tests.packaging.machine import booted

if TYPE_CHECKING:
    from pathlib import Path

    from tests.packaging.machine import Machine

#: Packages that the unit's machine needs besides Python.
PACKAGES = ("systemd", "systemd-sysv", "dbus", "postgresql")
_UNIT = "parapply@app"
_EXAMPLES = "/usr/share/doc/parapply/examples/roles"
_CONFIG = "/etc/parapply/app.toml"
_APP = """\
[source]
dsn = "host=127.0.0.1 dbname=a user=parapply_source"
slot = "app"
publications = ["app"]

[target]
dsn = "host=127.0.0.1 dbname=b user=parapply_target"
"""
_PASSWORDS = "127.0.0.1:5432:*:parapply_source:s\n127.0.0.1:5432:*:parapply_target:t\n"
#: systemd-analyze gives the whole unit 1.1; 0 would be perfect.
_EXPOSURE = "12"


class _Life:
    """One unit of one package in a machine that runs."""

    def __init__(self, machine: Machine, root: Path) -> None:
        self.machine = machine
        self.root = root
        self.n_rows = 0

    def sql(self, database: str, statement: str) -> str:
        """Return what a superuser's statement shows."""
        psql = ("runuser", "-u", "postgres", "--", "psql", "-XAtq", "-v", "ON_ERROR_STOP=1", database)
        return self.machine.run(*psql, feed=statement).strip()

    def parapply(self, *words: str) -> str:
        """Run a command of the package, with the unit's configuration and passwords."""
        environ = ("env", "PGPASSFILE=/etc/parapply/app.pgpass")
        return self.machine.run(*environ, "parapply", *words, "--config", _CONFIG)

    def applied(self) -> None:
        """Insert a row and wait until it is on the target."""
        self.n_rows += 1
        lsn = self.sql("a", f"INSERT INTO item VALUES ({self.n_rows}); SELECT pg_current_wal_insert_lsn()")
        self.parapply("wait", "--lsn", lsn, "--timeout", "60")
        assert self.sql("b", "SELECT count(*) FROM item") == str(self.n_rows)

    def prepared(self) -> None:
        """Make both databases, roles by the package's scripts, configuration and slot."""
        run = self.machine.run
        self.sql("postgres", "ALTER SYSTEM SET wal_level = 'logical'")
        run("systemctl", "restart", "postgresql")
        for database, script, role, password in (
            ("a", "publisher", "parapply_source", "s"), ("b", "subscriber", "parapply_target", "t"),
        ):  # fmt: skip
            self.sql("postgres", f"CREATE DATABASE {database}")
            self.sql(database, "CREATE TABLE item (id int PRIMARY KEY)")
            self.sql(database, f"\\set role {role}\n\\i {_EXAMPLES}/{script}.sql")
            self.sql(database, f"ALTER ROLE {role} PASSWORD '{password}'")
        self.sql("a", "CREATE PUBLICATION app FOR TABLE item")
        place = self.root / "etc" / "parapply"
        (place / "app.toml").write_text(_APP)
        (place / "app.pgpass").write_text(_PASSWORDS)
        (place / "app.pgpass").chmod(0o600)
        self.parapply("init")

    def pid(self) -> str:
        """Return the daemon's process id there."""
        return self.machine.shown(_UNIT, "MainPID")

    def starts(self) -> None:
        """Ready is when changes are applied; a slot without a configuration is refused by the unit itself."""
        run = self.machine.run
        assert run("systemd-analyze", "verify", f"{_UNIT}.service") == ""
        run("systemctl", "enable", "--now", _UNIT)
        assert run("systemctl", "is-active", _UNIT).strip() == "active"
        assert self.machine.fails("systemctl", "start", "parapply@none")
        self.applied()

    def is_confined(self) -> None:
        """Every directive was applied: no user but its own, no privileges, a read-only system, and two directories."""
        run = self.machine.run
        # A directive that the system cannot keep is left out with a word in the journal.
        assert "ignoring" not in run("journalctl", "--unit", _UNIT, "--output=cat")
        run("systemd-analyze", "security", f"--threshold={_EXPOSURE}", f"{_UNIT}.service")
        pid = self.pid()
        status = dict(line.split(":\t", 1) for line in run("cat", f"/proc/{pid}/status").splitlines() if ":\t" in line)
        assert "0" not in status["Uid"].split()
        assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {0}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        inside = ("nsenter", "--target", pid, "--mount")
        for path in ("/usr/none", "/etc/parapply/none", "/home/none"):
            assert self.machine.fails(*inside, "touch", path), path
        run(*inside, "touch", "/var/lib/parapply/app/some")
        run(*inside, "touch", "/var/log/parapply/app/some")
        assert run("stat", "--format=%a", "/var/lib/private/parapply/app").strip() == "700"

    def reloads(self) -> None:
        """`systemctl reload` takes another setting, in the same process."""
        pid = self.pid()
        path = self.root / _CONFIG.removeprefix("/")
        path.write_text(f"{_APP}\n[apply]\nworkers = 3\n")
        with self.machine.expecting(_UNIT, "config_reloaded", "source_connected"):
            self.machine.run("systemctl", "reload", _UNIT)
        self.applied()
        assert self.pid() == pid

    def restarts(self) -> None:
        """A crash, and a process that hangs, is followed by another daemon."""
        with self.machine.expecting(_UNIT, "Scheduled restart job", "Started"):
            self.machine.run("systemctl", "kill", "--signal=KILL", _UNIT)
        self.applied()
        drop_in = self.root / "etc/systemd/system/parapply@app.service.d"
        drop_in.mkdir(parents=True)
        (drop_in / "soon.conf").write_text("[Service]\nWatchdogSec=8\nTimeoutAbortSec=1\n")
        self.machine.run("systemctl", "daemon-reload")
        self.machine.run("systemctl", "restart", _UNIT)
        with self.machine.expecting(_UNIT, "Watchdog timeout", "Scheduled restart job", "Started"):
            self.machine.run("systemctl", "kill", "--signal=STOP", _UNIT)
        self.applied()

    def is_refused(self) -> None:
        """A failure that a restart cannot repair causes no restart: exit 3."""
        self.sql("a", "ALTER ROLE parapply_source NOLOGIN")
        assert self.machine.fails("systemctl", "restart", _UNIT)
        assert self.machine.shown(_UNIT, "ExecMainStatus") == "3"
        assert self.machine.shown(_UNIT, "ActiveState") == "failed"
        self.sql("a", "ALTER ROLE parapply_source LOGIN")
        self.machine.run("systemctl", "start", _UNIT)
        self.applied()

    def has_priorities(self) -> None:
        """The journal knows the priority of each line, and has taken off the mark that says it."""
        lines = self.machine.run("journalctl", "--unit", _UNIT, "--output=json").splitlines()
        of_daemon = [line for line in map(json.loads, lines) if str(line["MESSAGE"]).startswith("{")]
        found = {(json.loads(line["MESSAGE"])["event"], line["PRIORITY"]) for line in of_daemon}
        assert {("daemon_failed", "3"), ("target_connected", "6"), ("config_reloaded", "6")} <= found, found

    def is_renewed_and_removed(self) -> None:
        """Another package restarts the daemon, which drains; a removal stops it, and a purge takes its directories."""
        run, pid = self.machine.run, self.pid()
        run("dpkg", "--install", "/parapply.deb")
        assert self.pid() != pid
        self.applied()
        run("dpkg", "--remove", "parapply")
        assert self.machine.shown(_UNIT, "ActiveState") == "inactive"
        assert self.machine.shown(_UNIT, "ExecMainStatus") == "0"
        assert (self.root / "var/lib/private/parapply/app").exists()
        run("dpkg", "--purge", "parapply")
        assert not (self.root / "var/lib/private/parapply").exists()
        assert not (self.root / "var/log/private/parapply").exists()


def run(package: Path, root: Path) -> None:
    """Boot a Debian and have its systemd run the unit through its whole life."""
    shutil.copy(package, root / "parapply.deb")
    with booted(root) as machine:
        machine.run("dpkg", "--install", "/parapply.deb")
        life = _Life(machine, root)
        for step in (
            life.prepared, life.starts, life.is_confined, life.reloads, life.restarts, life.is_refused,
            life.has_priorities, life.is_renewed_and_removed,
        ):  # fmt: skip
            print(f"-- {step.__name__}", flush=True)  # noqa: T201  talks to a person
            step()
