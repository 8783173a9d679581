"""Compiles the hot path with Cython, for wheels and in place; without Cython or a C compiler the build is plain.

Used by hatchling as a build hook and by the Makefile as a program. The list of modules, the manifest and how a process
chooses are in ``src/parapply/hotpath.py``.

``PARAPPLY_BUILD``: ``auto`` (the default), ``require`` (fail where it cannot be compiled) or ``forbid``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # as a program it needs no hatchling
    BuildHookInterface = object

if TYPE_CHECKING:
    from types import ModuleType

VARIABLE = "PARAPPLY_BUILD"
#: Made by `make dist`, because a build has nothing that parapply depends on, and so no texts of its commands.
MANUAL = "parapply.1"


class HotPathHook(BuildHookInterface):  # type: ignore[type-arg, misc, unused-ignore]
    """Builds before a wheel is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile in place; a standard wheel takes the result along and is for this Python and platform only."""
        package = Path(self.root) / "src" / "parapply"
        hotpath = _hotpath(package)
        reason = build(package)
        self.app.display_info(_line(reason))
        manual = Path(self.root, MANUAL)
        if manual.exists() and version == "standard":
            build_data["shared_data"][str(manual)] = f"share/man/man1/{MANUAL}"
        if not reason and version == "standard":
            built = [*hotpath.extensions(package), package / hotpath.MANIFEST]
            # Ignored by git, so hatchling must be told of them.
            build_data["artifacts"] += [f"/{file.relative_to(self.root).as_posix()}" for file in built]
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


def build(package: Path) -> str:
    """Compile the hot modules beside their sources unless that was done, and write the manifest.

    Returns:
        Why nothing was compiled; nothing if all is.

    Raises:
        RuntimeError: compiling is required and failed, or the environment says something else than the three words.
    """
    wish = os.environ.get(VARIABLE) or "auto"
    if wish not in ("auto", "require", "forbid"):
        raise RuntimeError(f"{VARIABLE}={wish}: auto, require and forbid are possible")
    hotpath = _hotpath(package)
    manifest = package / hotpath.MANIFEST
    if wish != "forbid" and not hotpath.why_not_compiled(package):
        manifest.touch()  # make compares times
        return ""
    # Without a manifest nothing half built is used.
    manifest.unlink(missing_ok=True)
    for file in hotpath.extensions(package):
        file.unlink()
    reason = f"{VARIABLE}=forbid" if wish == "forbid" else _missing()
    if not reason:
        try:
            _compile(package, hotpath)
        except (Exception, SystemExit) as error:
            if wish == "require":
                raise
            reason = f"the compiler failed: {' '.join(str(error).split())[:200] or type(error).__name__}"
    if reason and wish == "require":
        raise RuntimeError(f"{VARIABLE}=require, but {reason}")
    hotpath.write_manifest(package, reason)
    return reason


def _missing() -> str:
    """Return what compiling needs and is not there."""
    if sys.maxsize < 1 << 32:
        return "offsets need 64 bits"
    if sys.implementation.name != "cpython":
        return "this is not CPython"
    for name in ("Cython", "setuptools"):
        if importlib.util.find_spec(name) is None:
            return f"no {name}"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        return f"no C compiler ({compiler})"
    return "" if Path(sysconfig.get_path("include"), "Python.h").exists() else "no Python.h"


def _compile(package: Path, hotpath: ModuleType) -> None:
    from Cython.Build import cythonize  # noqa: PLC0415  there is a plain build without it
    from setuptools import Distribution, Extension  # noqa: PLC0415  as above

    # Relative to the sources, so that no path of this machine gets into the modules.
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(package.parent):
        sources = {
            f"parapply.{module}": str(hotpath.module_file(Path("parapply"), module, ".py"))
            for module in hotpath.MODULES
        }
        modules = cythonize(
            [Extension(name, [file], extra_compile_args=["-g0"]) for name, file in sources.items()],
            build_dir=directory,
            # Annotations are mypy's; the compiler's types are in the .pxd files. Bounds stay checked, but for C arrays.
            compiler_directives={"language_level": 3, "annotation_typing": False, "boundscheck": True},
            quiet=True,
            show_all_warnings=False,
        )
        command = Distribution({"name": "parapply", "ext_modules": modules}).get_command_obj("build_ext")
        command.build_lib = command.build_temp = directory
        command.parallel = os.cpu_count()
        command.verbose = 0
        command.ensure_finalized()
        command.run()
        for file in Path(directory, "parapply").rglob("*.so"):
            place = package.parent / file.relative_to(directory)
            # In one move: a process that has the old one open keeps it.
            shutil.copy(file, place.with_suffix(".new"))
            place.with_suffix(".new").replace(place)


def _hotpath(package: Path) -> ModuleType:
    """Return the module by its file: the package itself would choose twins."""
    spec = importlib.util.spec_from_file_location("hotpath", package / "hotpath.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _line(reason: str) -> str:
    return f"hot path interpreted: {reason}" if reason else "hot path compiled"


if __name__ == "__main__":
    sys.stdout.write(_line(build(Path(__file__).parent / "src" / "parapply")) + "\n")
