"""Reading the configuration again: what is taken, what only a restart changes, what is refused."""

from __future__ import annotations

import os
import pty
from typing import TYPE_CHECKING

import msgspec
import pytest

from parapply.config import SECTIONS, Config, load_config
from parapply.errors import ConfigError
from parapply.runtime.reload import FIXED, IDENTITY, Reloader
from parapply.terminal import is_hung_up

if TYPE_CHECKING:
    from collections.abc import Callable

_ENVIRON = {
    "PARAPPLY_SOURCE__DSN": "dbname=a",
    "PARAPPLY_SOURCE__SLOT": "app",
    "PARAPPLY_SOURCE__PUBLICATIONS": "app",
    "PARAPPLY_TARGET__DSN": "dbname=b",
}


def _config(*overrides: str) -> Config:
    return load_config(None, overrides, {}, _ENVIRON)


def _reader(*overrides: str) -> Callable[[], Config]:
    return lambda: _config(*overrides)


def test_fixed_keys_exist() -> None:
    """A key that only a restart changes is one that there is."""
    keys = {f"{name}.{field.name}" for name, kind in SECTIONS.items() for field in msgspec.structs.fields(kind)}
    assert keys >= FIXED | IDENTITY


@pytest.mark.parametrize(
    ("override", "needs_epoch"),
    [
        ("apply.workers=9", True),
        ('apply.tables."public.t".parallel=never', True),
        ("conflict.insert_exists=skip", True),
        ("source.two_phase=true", True),
        ("applylog.detail=transaction", True),
        ("log.level=debug", False),
        ("log.format=console", False),
    ],
)
def test_what_is_taken(override: str, needs_epoch: bool) -> None:  # noqa: FBT001
    """Changed settings hold from now on, in a new epoch unless they only concern the log; repeated, nothing changes."""
    reloader = Reloader(_config(), _reader(override))
    assert reloader.reload() is needs_epoch
    assert reloader.config == _config(override)
    assert reloader.reload() is False


@pytest.mark.parametrize("key", sorted(FIXED))
def test_what_needs_a_restart(key: str) -> None:
    """It stays as it was, also beside something that is taken."""
    value = {"metrics.listen": ":9187", "applylog.directory": "log", "applylog.retention_s": "7200.5"}.get(key, "77777")
    overrides = [f"{key}={value}", "apply.workers=9"]
    if key == "applylog.rotate_s":
        overrides.append("applylog.retention_s=86400")
    elif key == "applylog.retention_bytes":
        overrides.append("applylog.rotate_bytes=5000")
    reloader = Reloader(_config(), _reader(*overrides))
    assert _config(*overrides) != _config("apply.workers=9")
    assert reloader.reload() is True
    assert reloader.config == _config("apply.workers=9")


@pytest.mark.parametrize("key", sorted(IDENTITY))
def test_another_slot_or_state_is_another_daemon(key: str) -> None:
    """Nothing of such a configuration is taken: with the old slot, its target would get what it must not."""
    reloader = Reloader(_config(), _reader(f"{key}=other", "target.dsn=dbname=c", "apply.workers=9"))
    assert reloader.reload() is False
    assert reloader.config == _config()


def test_what_is_refused() -> None:
    """A configuration with a mistake changes nothing."""
    reloader = Reloader(_config(), _reader("apply.workers=9", "apply.linger_s=-1"))
    with pytest.raises(ConfigError):
        _config("apply.linger_s=-1")
    assert reloader.reload() is False
    assert reloader.config == _config()


def test_a_terminal_that_closes_is_seen() -> None:
    """It sends SIGHUP, too, and does not ask for another configuration."""
    ours, terminal = pty.openpty()
    try:
        assert not is_hung_up([])
        assert not is_hung_up([terminal])
        os.close(ours)
        assert is_hung_up([terminal])
    finally:
        os.close(terminal)
