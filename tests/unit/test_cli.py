"""Command line: help with examples, exit codes, one line for an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import parapply
from parapply.cli import bench
from parapply.cli import main as cli
from parapply.cli.main import sources_digest
from parapply.cli.options import taken
from parapply.copy.command import CopyOptions
from parapply.errors import ApplyFailed, ParapplyError, SourceRefused, TargetRefused

CONNECTED = ["--source", "dbname=a", "--target", "dbname=b", "--slot", "app", "--publication", "app"]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PARAPPLY_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("command", [[], *([name] for name in cli.cli.list_commands(click.Context(cli.cli)))])
def test_help_has_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every command's help shows how it is called."""
    assert cli.main([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Examples:" in out
    assert f"parapply {' '.join(command)}".strip() in out.partition("Examples:")[2]


def test_version_names_what_matters_in_a_bug_report(capsys: pytest.CaptureFixture[str]) -> None:
    """--version names parapply, its sources, Python, psycopg, libpq and the twin of the hot path that runs."""
    assert cli.main(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"parapply {parapply.__version__}\n")
    for word in ("sources ", "python 3.", "psycopg 3.", "libpq ", "hot path "):
        assert word in out


def test_two_builds_of_one_version_differ(tmp_path: Path) -> None:
    """The digest of the sources is the same at another place, and another one after a change or under another name."""
    digests = []
    for place, name, content in (("a", "m.py", "1"), ("b", "m.py", "1"), ("c", "m.py", "2"), ("d", "n.py", "1")):
        (tmp_path / place / "sub").mkdir(parents=True)
        (tmp_path / place / "sub" / name).write_text(content, encoding="utf-8")
        digests.append(sources_digest(tmp_path / place))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["run", "--nonsense"],
        ["run", *CONNECTED, "--until", "zz"],
        ["run", *CONNECTED, "--until", "-1/0"],
        ["wait", "--lsn", "123"],
        ["wait", *CONNECTED],
        ["top", *CONNECTED, "--json"],
        ["top", *CONNECTED, "--once", "--interval", "0"],
        ["demo", "--workers", "65"],
    ],
)
def test_usage_errors_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command line is exit 2 and says what is wrong, without a traceback."""
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert "Error: " in err
    assert "Traceback" not in err


def test_configuration_errors_exit_2_all_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """All missing or wrong parts of the configuration are reported at once, a line each."""
    assert cli.main(["run", "--slot", "app", "--set", "apply.workers=0", "--set", "apply.nonsense=1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("parapply: ") for line in lines)
    keys = {line.split(": ")[1] for line in lines}
    assert keys == {"source.dsn", "source.publications", "target.dsn", "apply.workers", "apply.nonsense"}


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("init", {"source.dsn", "source.slot", "source.publications", "target.dsn"}),
        ("run", {"source.dsn", "source.slot", "source.publications", "target.dsn"}),
        ("status", {"source.dsn", "source.slot", "target.dsn"}),
        ("drop", {"source.dsn", "source.slot", "target.dsn"}),
        ("wait", {"source.slot", "target.dsn"}),
    ],
)
def test_commands_ask_only_for_what_they_need(
    command: str, missing: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that reads no publication does not ask for one."""
    assert cli.main([command, *(["--lsn", "0/1"] if command == "wait" else [])]) == 2
    assert {line.split(": ")[1] for line in capsys.readouterr().err.splitlines()} == missing


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (SourceRefused("slot lost.", hint="run init"), 3, "parapply: slot lost. Hint: run init\n"),
        (TargetRefused("no\n privilege"), 4, "parapply: no privilege\n"),
        (ApplyFailed(), 5, "parapply: A conflict or a data error remains after the retry at the head.\n"),
        (ParapplyError("postgres://u:hunter2@h/d"), 1, "parapply: postgresql://***\n"),
    ],
)
def test_errors_become_one_line_and_their_exit_code(
    error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each error of ours is one line that begins with parapply:, and its class's exit code; no secret prints."""

    @cli.cli.command("fails", hidden=True)
    def fails() -> None:
        raise error

    try:
        assert cli.main(["fails"]) == code
    finally:
        del cli.cli.commands["fails"]
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, click.Abort])
def test_interruption_exits_130(interruption: type[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends with 130 and without a traceback."""

    @cli.cli.command("stops", hidden=True)
    def stops() -> None:
        raise interruption

    try:
        assert cli.main(["stops"]) == 130
    finally:
        del cli.cli.commands["stops"]
    assert "Traceback" not in capsys.readouterr().err


def test_without_a_checkout_bench_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An installed package has no benchmark: one line says where it is, whatever its options; help also says so."""
    monkeypatch.setattr(bench, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(bench, "bench", bench.find_bench())
    assert cli.main(["bench", "--quick", "--workload=tpcb"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("parapply: The benchmark is part of the source, not of the installed package. Hint: get ")
    assert cli.main(["bench", "--help"]) == 0
    assert "make bench" in capsys.readouterr().out


def test_module_is_the_command() -> None:
    """`python -m parapply` is the command, with its exit codes, and an unknown failpoint is a configuration error."""
    environ = {**os.environ, "PYTHONPATH": str(Path(parapply.__file__).parents[1]), "PARAPPLY_FAILPOINT": "x:kill"}
    done = subprocess.run(
        [sys.executable, "-m", "parapply", "run"], env=environ, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith("parapply: PARAPPLY_FAILPOINT: unknown point 'x'")
    assert len(done.stderr.splitlines()) == 1


def test_options_are_the_fields_of_their_struct() -> None:
    """A command's struct takes the options that its fields name; one that is not given leaves the field's default."""
    options = {"truncates": True, "pg_dump": None, "tables": ("public.a",), "slot": "app"}
    assert taken(CopyOptions, options, resumes=True) == CopyOptions(truncates=True, tables=("public.a",), resumes=True)


def test_help_does_not_load_the_driver() -> None:
    """Help and usage errors answer at once: the driver and the validation are loaded by the commands that need them."""
    script = (
        "import sys; from parapply.cli.main import main; main(['--help']);"
        "sys.exit(sum(name in sys.modules for name in ('psycopg', 'msgspec', 'structlog', 'rich')))"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(parapply.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0


def test_a_daemon_without_an_endpoint_loads_no_page() -> None:
    """A start imports nothing that its first row does not need."""
    names = ("html", "parapply.http_server", "parapply.runtime.observe.http", "parapply.runtime.observe.page")
    script = f"import sys; import parapply.runtime.daemon; sys.exit(sum(name in sys.modules for name in {names}))"
    environ = {**os.environ, "PYTHONPATH": str(Path(parapply.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize("group", ["workers=4", "apply.workers", "apply.workers='4"])
def test_a_run_of_a_replay_takes_settings_only(group: str) -> None:
    """A group that is not of settings is named with its option, before anything is read."""
    done = CliRunner().invoke(cli.cli, ["replay", "nowhere", "--target", "dbname=x", "--run", group])
    assert done.exit_code == 2
    assert "--run" in done.output.splitlines()[-1]


def test_a_password_in_a_run_is_not_shown() -> None:
    """Words of a connection string that was not quoted are no settings, and are secret."""
    for group in ("target.dsn=host=x password=hunter2", "target.dsn='host=x password=hunter2"):
        done = CliRunner().invoke(cli.cli, ["replay", "nowhere", "--target", "dbname=x", "--run", group])
        assert (done.exit_code, "hunter2" in done.output) == (2, False)


def test_a_password_that_cuts_a_uri_of_the_command_line_is_not_shown() -> None:
    """As in the configuration, it is refused before a part of it is taken for a host."""
    words = ["replay", "nowhere", "--target", "dbname=x", "--copy-of", "postgresql://u:p@hunter2@nohost.invalid/d"]
    done = CliRunner().invoke(cli.cli, words)
    assert (done.exit_code, "hunter2" in done.output) == (2, False)
    assert "--copy-of: must name hosts" in done.output


def test_check_refuses_the_totals_that_run_refuses(tmp_path: Path) -> None:
    """A file of several databases whose totals are too small ends both with the same words; nothing is asked."""
    path = tmp_path / "fleet.toml"
    path.write_text("""databases = ["a", "b"]
[source]
dsn = "host=nowhere"
slot = "app"
publications = ["app"]
[target]
dsn = "host=nowhere"
[fleet]
max_connections = 3
""", encoding="utf-8")  # fmt: skip
    for command in ("run", "check"):
        done = subprocess.run([*_PARAPPLY, command, "--config", path], capture_output=True, text=True, check=False,
                              timeout=60)  # fmt: skip
        assert done.returncode == 2
        assert "fleet.max_connections: must be 0, or at least 12 for 2 databases" in done.stdout + done.stderr


_PARAPPLY = [sys.executable, "-m", "parapply"]


@pytest.mark.parametrize("command", [["--help"], ["--version"], ["status", "--help"]])
def test_an_output_that_takes_nothing_is_one_line(command: list[str]) -> None:
    """A full disk below standard output: one line and exit 1, no traceback, and Python adds nothing at its end."""
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run([*_PARAPPLY, *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "parapply: standard output: No space left on device\n")


def test_a_closed_file_is_replaced() -> None:
    """With standard error closed a command says what it says on standard output, and its exit code stays."""
    shell = ["sh", "-c", 'exec "$@" 2>&-', "sh", *_PARAPPLY]
    done = subprocess.run([*shell, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"parapply {parapply.__version__}")
    assert subprocess.run([*shell, "run"], capture_output=True, check=False).returncode == 2


def test_ctrl_c_during_the_imports_is_silent() -> None:
    """An interrupt while modules are imported ends the process as the signal does, without their traceback."""
    program = (
        "import os, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'click': os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from parapply.__main__ import run\n"
        "run()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_an_error_is_one_in_the_journal(tmp_path: Path) -> None:
    """The last line of a service has the priority of an error, where systemd says that it goes to the journal."""
    path = tmp_path / "journal"
    with path.open("wb") as journal:
        place = os.fstat(journal.fileno())
        environ = {**os.environ, "JOURNAL_STREAM": f"{place.st_dev}:{place.st_ino}"}
        done = subprocess.run([*_PARAPPLY, "run"], stderr=journal, env=environ, check=False)
    assert done.returncode == 2
    assert all(line.startswith("<3>parapply: ") for line in path.read_text(encoding="utf-8").splitlines())
