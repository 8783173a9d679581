"""The line of a database in a pgbouncer.ini: only host, port and dbname change, and change back to the same bytes."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest

from parapply.cutover import poolers
from parapply.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_FILE = """\
;; app = host=comment
[databases]
app = host=a port=6000 user='the ''owner' pool_size=7
"the ""shop" =  pool_mode=session   connect_query='SELECT 1'
# "x" = host=x
other = host=c
[users]
app = pool_mode=session
[pgbouncer]
listen_port = 6432
"""
_NEW = {"host": "b,c", "port": "5432", "dbname": "it's new"}


@pytest.mark.parametrize(
    ("database", "words", "line"),
    [
        ("app", {"host": "a", "port": "6000", "dbname": None},
         "app = host=b,c port=5432 user='the ''owner' pool_size=7 dbname='it''s new'"),
        ('the "shop', {"host": None, "port": None, "dbname": None},
         '"the ""shop" =  pool_mode=session   connect_query=\'SELECT 1\' host=b,c port=5432 dbname=\'it\'\'s new\''),
    ],
)  # fmt: skip
def test_it_is_rewritten_and_back(tmp_path: Path, database: str, words: dict[str, str | None], line: str) -> None:
    """All else stays byte for byte, and so do the rights of the file."""
    path = tmp_path / "pgbouncer.ini"
    path.write_bytes(_FILE.replace("\n", "\r\n").encode() + b"; \xff\n")
    path.chmod(0o640)
    before = path.read_bytes()
    assert poolers.read_entry(path, database) == words
    poolers.rewrite_entry(path, database, _NEW)
    pairs = zip(path.read_bytes().split(b"\r\n"), before.split(b"\r\n"), strict=True)
    changed = [new for new, old in pairs if new != old]
    assert changed == [line.encode()]
    assert poolers.read_entry(path, database) == _NEW
    poolers.rewrite_entry(path, database, words)
    assert path.read_bytes() == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [one.name for one in tmp_path.iterdir()] == ["pgbouncer.ini"]


@pytest.mark.parametrize("text", ["[databases]\n", "[databases]\napp = host=a\napp = host=b\n", "app = host=a\n"])
def test_a_file_without_just_one_line_is_refused(tmp_path: Path, text: str) -> None:
    """Two lines of a name, none, or one of another section: it is not known which one the pooler reads."""
    path = tmp_path / "pgbouncer.ini"
    path.write_text(text)
    with pytest.raises(ConfigError, match="lines for the database 'app'"):
        poolers.rewrite_entry(path, "app", _NEW)
    assert path.read_text() == text


@pytest.mark.parametrize("value", ["host", "host='a", "host=a junk"])
def test_a_line_that_is_not_understood_is_refused(tmp_path: Path, value: str) -> None:
    """It is left as it is."""
    path = tmp_path / "pgbouncer.ini"
    path.write_text(f"[databases]\napp = {value}\n")
    with pytest.raises(ConfigError, match="is not key=value"):
        poolers.read_entry(path, "app")


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    """The file behind it is replaced."""
    (tmp_path / "real.ini").write_text("[databases]\napp = host=a\n")
    link = tmp_path / "link.ini"
    link.symlink_to("real.ini")
    poolers.rewrite_entry(link, "app", {"host": "b"})
    assert link.is_symlink()
    assert (tmp_path / "real.ini").read_text() == "[databases]\napp = host=b\n"
