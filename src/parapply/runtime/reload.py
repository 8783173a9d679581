"""A reload of the configuration: the layers are read again, and the differences are taken or named.

The input is the configuration in force and a way to read the layers, the output the configuration to go on with. A
refused configuration changes nothing. Settings of the process, not of an epoch, stay unchanged until a restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from parapply import logs
from parapply.config import Config
from parapply.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

#: Keys that identify the daemon. If one of them changed, the file describes another daemon: apply none of it.
IDENTITY: Final = frozenset({"source.slot", "target.state_schema"})
#: Other keys that only a restart changes: the daemon's port, and the files of its apply log.
FIXED: Final = frozenset({
    "metrics.listen", "applylog.directory", "applylog.rotate_bytes", "applylog.rotate_s", "applylog.retention_s",
    "applylog.retention_bytes",
})  # fmt: skip
_LOG: Final = frozenset({"log.level", "log.format"})


class Reloader:
    """Knows the configuration that holds from the next epoch on, and the present contents of the layers."""

    def __init__(self, config: Config, load: Callable[[], Config]) -> None:
        """Start with the configuration in force; `load` reads all layers again, and raises ConfigError."""
        #: Read by the daemon before each epoch, written here only.
        self.config = config
        self._load = load
        self._log = logs.get_logger()

    def reload(self) -> bool:
        """Read the layers again and log the result; return whether another epoch is needed.

        Levels and format of the log change at once. No value is logged, only keys: a value may be a secret.
        """
        try:
            found = self._load()
        except ConfigError as error:
            return self._refuse(str(error))
        differs = changed(self.config, found)
        if others := sorted(differs & IDENTITY):
            return self._refuse("\n".join(f"{key}: another one needs another daemon" for key in others))
        if fixed := sorted(differs & FIXED):
            self._log.warning("config_needs_restart", settings=fixed)
        taken = differs - FIXED
        if taken:
            self.config = _with(self.config, found, taken)
        if taken & _LOG:
            logs.configure(found.log.level, found.log.format)
        self._log.info("config_reloaded", settings=sorted(taken))
        return bool(taken - _LOG)

    def differs_from(self, config: Config) -> bool:
        """Return whether more than the log is other than in a configuration that was in force."""
        return self.config is not config and bool(changed(config, self.config) - _LOG)

    def _refuse(self, why: str) -> bool:
        self._log.error("config_refused", error=why, hint="the configuration in force stays")
        return False


def changed(old: Config, new: Config) -> set[str]:
    """Return the dotted keys whose values differ."""
    values, now = _values(old), _values(new)
    return {key for key in values if values[key] != now[key]}


def _values(config: Config) -> dict[str, object]:
    sections = msgspec.structs.asdict(config).items()
    return {f"{name}.{key}": value for name, part in sections for key, value in msgspec.structs.asdict(part).items()}


def _with(old: Config, new: Config, keys: set[str]) -> Config:
    sections = {}
    for name, part in msgspec.structs.asdict(new).items():
        taken = {key: value for key, value in msgspec.structs.asdict(part).items() if f"{name}.{key}" in keys}
        sections[name] = msgspec.structs.replace(getattr(old, name), **taken)
    return Config(**sections)
