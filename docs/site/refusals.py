"""The texts of every error of the program, found in its source: a message is written where its fault is seen."""

from __future__ import annotations

import ast
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import parapply
from parapply import errors
from parapply.errors import ParapplyError, ProtocolError, StatementFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SOURCES: Final = Path(parapply.__file__).parent
#: Stands for what is known when the error is raised.
OPEN: Final = "..."
#: Names of names that are followed.
_DEPTH: Final = 3
#: Never printed: the worker makes another one of it, or it is the parent of others.
_INNER: Final = (StatementFailed,)


class Refusal(NamedTuple):
    """One text of an error."""

    message: str
    hint: str


@cache
def by_class() -> dict[type[ParapplyError], list[Refusal]]:
    """Return the texts of each class of errors, in the order of exit codes, then of `parapply.errors`."""
    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, ParapplyError) and kind not in _INNER
    }
    found: dict[type[ParapplyError], set[Refusal]] = {kind: set() for kind in classes.values()}
    for path in sorted(_SOURCES.rglob("*.py")):
        for name, refusal in _raised(ast.parse(path.read_text(encoding="utf-8")), classes):
            found[classes[name]].add(refusal)
    ordered = sorted(found, key=lambda kind: kind.exit_code)
    return {kind: sorted(found[kind]) for kind in ordered}


def _raised(tree: ast.Module, classes: Mapping[str, type[ParapplyError]]) -> Iterator[tuple[str, Refusal]]:
    """Yield the texts of each call of an error's class, with every text that a name in it may have."""
    constants = _assigned(tree.body)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes):
            continue
        around = [one for one in functions if one.lineno <= node.lineno <= (one.end_lineno or 0)]
        names = constants | (_assigned(list(ast.walk(around[-1]))) if around else {})
        for message, hint in product(*_parts(node, classes[node.func.id], names)):
            yield node.func.id, Refusal(" ".join(message.split()), " ".join(hint.split()))


def _parts(
    call: ast.Call, kind: type[ParapplyError], names: Mapping[str, list[ast.expr]]
) -> tuple[list[str], list[str]]:
    """Return what the message of a call may be, and its hint."""
    if issubclass(kind, ProtocolError):
        made = ProtocolError(OPEN, 0, OPEN)
        return [str(made).replace("offset 0", f"offset {OPEN}")], [made.hint]
    hints = [keyword.value for keyword in call.keywords if keyword.arg == "hint"]
    return _texts(call.args[0], names) if call.args else [OPEN], _texts(hints[0], names) if hints else [""]


def _assigned(nodes: list[ast.stmt] | list[ast.AST]) -> dict[str, list[ast.expr]]:
    """Return the values of names, of a module or within a function."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        for target in targets:
            if isinstance(target, ast.Name) and value is not None:
                found.setdefault(target.id, []).append(value)
    return found


def _texts(node: ast.expr | None, names: Mapping[str, list[ast.expr]], depth: int = 0) -> list[str]:
    """Return every text that an expression may be, as far as the source says so."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(_texts(part, {})[0] if isinstance(part, ast.Constant) else OPEN for part in parts)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            pairs = product(_texts(left, names, depth + 1), _texts(right, names, depth + 1))
            return [first + second for first, second in pairs]
    return [text for one in _choices(node, names, depth) for text in _texts(one, names, depth + 1)] or [OPEN]


def _choices(node: ast.expr | None, names: Mapping[str, list[ast.expr]], depth: int) -> list[ast.expr]:
    """Return the expressions of which one is the value; none where only the run knows."""
    match node:
        case ast.IfExp(body=one, orelse=other):
            return [one, other]
        case ast.BoolOp(values=values) | ast.Dict(values=values):
            return values
        case ast.Subscript(value=value):
            return [value]
        case ast.Name(id=name) if depth < _DEPTH:
            return names.get(name, [])
    return []
