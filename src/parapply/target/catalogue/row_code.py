"""Row triggers that, like a generated column, read and write nothing but the row that is written. Pure.

In: the body of a PL/pgSQL function. Out: the columns of the row that it reads and assigns, or None for a body that is
not in the grammar below: its table is serial.

    body       BEGIN statement ... END
    statement  NEW.column := expression;   RETURN NEW;   NULL;
               IF expression THEN statement ... [ELSIF ...] [ELSE ...] END IF;
    expression of NEW.column, OLD.column, TG_OP, literals, and the operators, words and functions listed here

The listed names are PostgreSQL's own, because sessions that apply look for names in pg_catalog only. The catalogue
query leaves out functions with settings, and every trigger where a user has put such a name or a cast there. None of
the listed looks at a clock, a random number, another row or the transaction. (PostgreSQL manual, "PL/pgSQL".)
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from parapply.plan.table import RowTrigger

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Functions whose result depends on nothing but their arguments, for arguments of the types below.
FUNCTIONS: Final = frozenset({
    "abs", "btrim", "ceil", "ceiling", "char_length", "character_length", "concat", "concat_ws", "floor", "initcap",
    "left", "length", "lower", "lpad", "ltrim", "md5", "mod", "octet_length", "repeat", "replace", "reverse", "right",
    "round", "rpad", "rtrim", "sign", "split_part", "starts_with", "strpos", "substr", "trunc", "upper",
})  # fmt: skip
OPERATORS: Final = frozenset({"+", "-", "*", "/", "%", "<", ">", "=", "<=", ">=", "<>", "!=", "||"})
#: Base types, by OID: bool, bytea, int8, int2, int4, text, jsonb, float4, float8, bpchar, varchar, numeric, uuid. Not
#: dates and times: their input functions read the clock for 'now' and 'today'.
TYPES: Final = frozenset({16, 17, 20, 21, 23, 25, 3802, 700, 701, 1042, 1043, 1700, 2950})

#: Words of PostgreSQL's grammar with an argument list, and without one.
_CALLS: Final = frozenset({"coalesce", "greatest", "least", "nullif", "trim"})
_WORDS: Final = frozenset({
    "and", "between", "case", "distinct", "else", "end", "false", "from", "in", "is", "like", "not", "null", "or",
    "tg_op", "then", "true", "when",
})  # fmt: skip
#: Words that an argument list or other expression in parentheses may follow.
_BEFORE_PARENTHESIS: Final = _WORDS - {"end", "false", "null", "tg_op", "true"}

#: In the order in which PostgreSQL's scanner decides. Text that none of them matches refuses the body.
_TOKENS: Final = (
    r"(?ia)(?P<space>[ \t\r\n\f]+|--[^\r\n]*)"
    r"|(?P<column>(?P<record>new|old)\.(?P<name>[a-z_][a-z0-9_]*|\"(?:[^\"]|\"\")+\")(?![\w$.\"]))"
    r"|(?P<word>[a-z_][a-z0-9_]*(?![\w$.\"']))"
    r"|(?P<number>[0-9]+(?:\.[0-9]+)?(?![\w$.]))"
    r"|(?P<text>'(?:[^'\\]|'')*'(?!'))"
    r"|(?P<sign>:=|[-+*/<>=~!@#%^&|`?]+|[();,])"
)

_Token = tuple[str, str]
_END: Final[_Token] = ("end", "")


class _NotPlainError(Exception):
    """The body is not of the grammar."""


def row_trigger(name: str, version: str, body: str, *, fires_on_all: bool) -> RowTrigger | None:
    """Return a trigger that reads and writes its row only; None if it may do anything else.

    Args:
        name: for people.
        version: changes when the trigger or its function does.
        body: of the function, in PL/pgSQL.
        fires_on_all: on inserts and on updates.
    """
    try:
        parser = _Body(_tokens(body))
        parser.read()
    except _NotPlainError:
        return None
    return RowTrigger(
        name=name,
        version=version,
        reads=tuple(sorted(parser.reads)),
        writes=tuple(sorted(parser.writes)),
        is_function_of_new=fires_on_all and not parser.has_branches,
    )


def _tokens(body: str) -> list[_Token]:
    found: list[_Token] = []
    at, tokens = 0, re.compile(_TOKENS)
    while at < len(body):
        token = tokens.match(body, at)
        if token is None:
            raise _NotPlainError
        at = token.end()
        kind = token.lastgroup
        if kind == "column" or token["column"]:
            name = token["name"]
            column = name[1:-1].replace('""', '"') if name.startswith('"') else name.lower()
            found.append((token["record"].lower(), column))
        elif kind != "space":
            assert kind is not None, "something has matched"
            found.append((kind, token[0].lower() if kind == "word" else token[0]))
    return found


class _Body:
    """One body, read once from begin to end."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        """Start before the first token."""
        self._tokens = tokens
        self._at = 0
        self.reads: set[str] = set()
        self.writes: set[str] = set()
        #: True if the old row, the operation or a branch decides about an assignment.
        self.has_branches = False
        self._has_returned = False

    def read(self) -> None:
        """Read all of it.

        Raises:
            _NotPlainError: it is not of the grammar, or does not end with RETURN NEW.
        """
        self._expect("word", "begin")
        self._statements({"end"})
        self._expect("word", "end")
        if self._next == ("sign", ";"):
            self._take()
        if self._next is not _END or not self._has_returned:
            raise _NotPlainError

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else _END

    def _take(self) -> _Token:
        token = self._next
        self._at += 1
        return token

    def _expect(self, *wanted: str) -> None:
        if self._take() != wanted:
            raise _NotPlainError

    def _statements(self, ends: Iterable[str]) -> None:
        while not (self._next[0] == "word" and self._next[1] in ends):
            self._statement()

    def _statement(self) -> None:
        kind, value = self._take()
        # A RETURN is sure to be reached only as the last statement of the outermost block.
        self._has_returned = False
        if kind == "new":
            if self._take() not in (("sign", ":="), ("sign", "=")):
                raise _NotPlainError
            self.writes.add(value)
            self._expression(";")
        elif (kind, value) == ("word", "return"):
            self._expect("word", "new")
            self._expect("sign", ";")
            self._has_returned = True
            if self._next != ("word", "end"):
                self.has_branches = True
        elif (kind, value) == ("word", "null"):
            self._expect("sign", ";")
        elif (kind, value) == ("word", "if"):
            self._if()
        else:
            raise _NotPlainError

    def _if(self) -> None:
        self.has_branches = True
        self._expression("then")
        self._statements({"elsif", "elseif", "else", "end"})
        while self._next[1] in ("elsif", "elseif"):
            self._take()
            self._expression("then")
            self._statements({"elsif", "elseif", "else", "end"})
        if self._next[1] == "else":
            self._take()
            self._statements({"end"})
        self._expect("word", "end")
        self._expect("word", "if")
        self._expect("sign", ";")
        self._has_returned = False

    def _expression(self, end: str) -> None:
        """Read up to the first `end` outside of parentheses, as PL/pgSQL does, and that as well."""
        depth = 0
        before: _Token = _END
        is_empty = True
        while True:
            token = self._take()
            kind, value = token
            if not depth and value == end and kind in ("word", "sign"):
                break
            is_empty = False
            depth += self._part(token, before)
            if depth < 0 or (value == "," and not depth):
                raise _NotPlainError
            before = token
        if is_empty:
            raise _NotPlainError

    def _part(self, token: _Token, before: _Token) -> int:
        """Check one token of an expression; return the change of depth for the tokens behind it."""
        kind, value = token
        if kind in ("new", "old"):
            self.reads.add(value)
            self.has_branches = self.has_branches or kind == "old"
        elif kind == "word":
            self._word(value, before)
        elif token == ("sign", "("):
            self._before_parenthesis(before)
            return 1
        elif token == ("sign", ")"):
            return -1
        elif kind == "sign":
            if value != "," and value not in OPERATORS:
                raise _NotPlainError
        elif kind not in ("number", "text"):
            raise _NotPlainError
        return 0

    def _word(self, word: str, before: _Token) -> None:
        if self._next == ("sign", "(") and (word in FUNCTIONS or word in _CALLS):
            return
        # FROM would make a query of the expression, and so would DISTINCT at its begin.
        is_misplaced = (word == "from" and before != ("word", "distinct")) or (
            word == "distinct" and before not in (("word", "is"), ("word", "not"))
        )
        if word not in _WORDS or is_misplaced:
            raise _NotPlainError
        self.has_branches = self.has_branches or word == "tg_op"

    def _before_parenthesis(self, before: _Token) -> None:
        kind, value = before
        is_call = kind == "word" and (value in FUNCTIONS or value in _CALLS)
        is_after_word = kind == "word" and value in _BEFORE_PARENTHESIS
        is_after_sign = kind == "sign" and value != ")"
        if not (is_call or is_after_word or is_after_sign or before is _END):
            raise _NotPlainError
