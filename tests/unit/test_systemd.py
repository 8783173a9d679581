"""The systemd unit: what systemd itself says of it, and that what a restart cannot repair is not restarted."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parapply import errors
from parapply.config import load_config

_CONFIG = Path(__file__).parents[2] / "config"
UNIT = _CONFIG / "systemd" / "parapply@.service"
_PAGE = _CONFIG.parent / "docs" / "how-to" / "run-as-a-service.md"
_PROGRAM = "/opt/parapply/bin/parapply"
#: systemd's own word for up to 2.0 is OK; the network, which the daemon needs, costs a point.
_EXPOSURE = 1.5


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """Return an instance of the unit with an existing program, because its existence is not the unit's affair."""
    text = UNIT.read_text(encoding="utf-8")
    assert _PROGRAM in text
    (tmp_path / UNIT.name).write_text(text.replace(_PROGRAM, sys.executable), encoding="utf-8")
    return tmp_path / "parapply@app.service"


def _settings(name: str) -> list[str]:
    return re.findall(rf"^{re.escape(name)}=(.*)$", UNIT.read_text(encoding="utf-8"), re.MULTILINE)


def _analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze") or "systemd-analyze"
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.systemd
def test_systemd_takes_every_line(unit: Path) -> None:
    """`systemd-analyze verify` finds nothing to say, not even an unknown key."""
    done = _analyze("verify", str(unit))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.systemd
def test_little_is_exposed(unit: Path) -> None:
    """`systemd-analyze security` calls it OK, with the network that it needs."""
    template = unit.with_name(UNIT.name)
    done = _analyze("security", "--offline=yes", "--json=short", f"--threshold={_EXPOSURE * 10:.0f}", str(template))
    assert done.returncode == 0, done.stderr
    exposed = {str(line["json_field"]) for line in json.loads(done.stdout) if line["exposure"]}
    assert not exposed & {"NoNewPrivileges", "PrivateTmp", "ProtectSystem", "ProtectHome", "UserOrDynamicUser"}


def test_what_needs_an_operator_is_not_restarted() -> None:
    """Each exit code of an error that no retry helps stays an end; a crash, a kill and the watchdog's are restarted."""
    (restart,), (prevented,) = _settings("Restart"), _settings("RestartPreventExitStatus")
    told = {
        one.exit_code
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, errors.ParapplyError)
    }
    # 1 is an error that is no error of the daemon's: a bug.
    assert {int(code) for code in prevented.split()} == told - {1}
    assert restart == "on-failure"


def test_a_daemon_that_stands_by_does_not_give_up() -> None:
    """The page's time for a second host is years, because no restart follows once it is over."""
    (setting,) = re.findall(r"`(target\.lease_wait_s = \S+)`", _PAGE.read_text(encoding="utf-8"))
    config = load_config(None, [setting.replace(" ", "")], environ={}, required=())
    assert config.target.lease_wait_s > 10 * 365 * 86_400
    assert str(errors.LeaseHeld.exit_code) in _settings("RestartPreventExitStatus")[0].split()


def test_its_environment_is_configuration() -> None:
    """The daemon understands the settings of the unit, and they lie where the unit lets it write."""
    given = dict(line.split("=", 1) for line in _settings("Environment"))
    environ = {name: value.replace("%S", "/var/lib").replace("%L", "/var/log").replace("%i", "app")
               for name, value in given.items() if name.startswith("PARAPPLY_")}  # fmt: skip
    config = load_config(None, environ=environ, required=())
    assert str(config.apply.spill_dir) == "/var/lib/parapply/app"
    assert str(config.applylog.directory) == "/var/log/parapply/app"
    assert [_settings("StateDirectory"), _settings("LogsDirectory")] == [["parapply/%i"], ["parapply/%i"]]


def test_secrets_stand_in_files() -> None:
    """Passwords come by a file or a credential, never by the unit, which everybody can read."""
    assert _settings("EnvironmentFile") == ["-/etc/parapply/%i.env"]
    assert _settings("LoadCredential") == ["pgpass:/etc/parapply/%i.pgpass"]
    assert not re.search(r"DSN=|password=", UNIT.read_text(encoding="utf-8"))


def test_libpq_takes_the_credential(tmp_path: Path) -> None:
    """The daemon's password file is its user's alone, also where systemd's credential shows its ACL as mode 0440."""
    (tmp_path / "parapply" / "app").mkdir(parents=True)
    (tmp_path / "pgpass").write_text("*:*:*:*:secret\n", encoding="utf-8")
    (tmp_path / "pgpass").chmod(0o440)
    commands = [*_settings("ExecStartPre"), *(x for x in _settings("Environment") if x.startswith("PGPASSFILE="))]
    first, passfile = (
        x.replace("%d", str(tmp_path)).replace("%t", str(tmp_path)).replace("%i", "app") for x in commands
    )
    subprocess.run(first.split(), check=True, timeout=20)
    copy = Path(passfile.removeprefix("PGPASSFILE="))
    assert (copy.stat().st_mode & 0o777, copy.read_text(encoding="utf-8")) == (0o600, "*:*:*:*:secret\n")
