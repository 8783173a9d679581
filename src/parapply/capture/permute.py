"""Permutations by a key: numbers of a range, and texts of one form, one to one. Pure.

Each replacement has the form of what it replaces, equal values stay equal and unequal ones unequal, so keys still meet.
Nothing can be read back without the key but what equality, length and number of occurrences show.

Source: a Feistel network over the smallest even number of bits, walked until the result is in the range (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains"), with BLAKE2b as round function.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b, shake_256
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

#: Rounds of the network.
_ROUNDS: Final = 8
#: Ranges up to this size have a table.
_SMALL: Final = 1024
#: Characters of a text up to which it is permuted as one number; a longer one is replaced by a stream that its hash
#: gives, of which no two are equal but by a collision of the hash.
_LONGEST: Final = 48
_KEPT_VALUES: Final = 65_536

_LOWER: Final = "abcdefghijklmnopqrstuvwxyz"
#: Ends of classes of numbers: another number of digits, and what the integers of PostgreSQL end with, so that a number
#: is replaced alike whatever the width of its column.
_ENDS: Final[list[int]] = sorted({0, 1 << 15, 1 << 31, 1 << 32, 1 << 63, *[10**digits for digits in range(1, 40)]})
_LARGE: Final[int] = 10**39


class Alphabet:
    """Characters that stand for each other: of a text, or of a range of code points but for a hole in it."""

    def __init__(self, first: str, size: int, hole: tuple[int, int] | None = None) -> None:
        """Keep them: all, or the first of a range of this size, whose hole are code points that are no characters."""
        self.size = size
        self._chars = first if len(first) == size else ""
        self._first = ord(first[0])
        self._hole = hole

    def index(self, char: str) -> int:
        """Return the number of a character."""
        if self._chars:
            return self._chars.index(char)
        code = ord(char)
        is_behind = self._hole is not None and code >= self._hole[1]
        return code - self._first - (self._hole_size if is_behind else 0)

    def char(self, index: int) -> str:
        """Return the character of a number."""
        if self._chars:
            return self._chars[index]
        code = self._first + index
        return chr(code + self._hole_size if self._hole is not None and code >= self._hole[0] else code)

    @property
    def _hole_size(self) -> int:
        return self._hole[1] - self._hole[0] if self._hole is not None else 0


_ASCII: Final = {
    **dict.fromkeys(_LOWER, Alphabet(_LOWER, 26)),
    **dict.fromkeys(_LOWER.upper(), Alphabet(_LOWER.upper(), 26)),
    **dict.fromkeys("0123456789", Alphabet("0123456789", 10)),
}
#: By the first code point that UTF-8 writes in more bytes: a replacement takes as many as the original.
_MULTIBYTE: Final = (
    (0x80, None),
    (0x800, Alphabet("\x80", 0x800 - 0x80)),
    (0x10000, Alphabet("\u0800", 0x10000 - 0x800 - 0x800, (0xD800, 0xE000))),
    (0x110000, Alphabet("\U00010000", 0x110000 - 0x10000)),
)
_HEX: Final = Alphabet("0123456789abcdef", 16)
_BIT: Final = Alphabet("01", 2)


def _alphabet(char: str) -> Alphabet | None:
    """Return the characters that may replace one; None: it stays."""
    code = ord(char)
    if code < _MULTIBYTE[0][0]:
        return _ASCII.get(char)
    return next(alphabet for end, alphabet in _MULTIBYTE if code < end)


class Permutation:
    """All replacements of one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._tables: dict[tuple[str, int], list[int]] = {}
        self._short_text: Callable[[str], str] = lru_cache(_KEPT_VALUES)(self._text)
        self._kept_integer: Callable[[int], int] = lru_cache(_KEPT_VALUES)(self._integer)

    @property
    def check(self) -> str:
        """Return a text that is the same for the same key."""
        return blake2b(b"check", key=self._key, digest_size=16).hexdigest()

    def within(self, tag: str, number: int, size: int) -> int:
        """Return the number from 0 to below `size` that replaces one of them, for one kind of number."""
        if size <= _SMALL:
            return self._table(tag, size)[number]
        half_bits = ((size - 1).bit_length() + 1) // 2
        mask = (1 << half_bits) - 1
        n_bytes = (half_bits + 7) // 8
        salt = f"{tag} {size} ".encode()
        while True:
            left, right = number >> half_bits, number & mask
            for turn in range(_ROUNDS):
                data = salt + bytes((turn,)) + right.to_bytes(n_bytes)
                left, right = right, left ^ (self._digest(data, n_bytes) & mask)
            number = left << half_bits | right
            if number < size:
                return number

    def _digest(self, data: bytes, n_bytes: int) -> int:
        return int.from_bytes(blake2b(data, key=self._key, digest_size=n_bytes).digest())

    def _table(self, tag: str, size: int) -> list[int]:
        found = self._tables.get((tag, size))
        if found is None:
            order = [(self._digest(f"{tag} {size} {number}".encode(), 16), number) for number in range(size)]
            found = self._tables[tag, size] = [number for _, number in sorted(order)]
        return found

    def integer(self, number: int) -> int:
        """Return the replacement of a whole number: of the same sign and number of digits."""
        return self._kept_integer(number)

    def _integer(self, number: int) -> int:
        if number < 0:
            # The least integer of a width has no positive twin.
            return -self.integer(-(number + 1)) - 1
        for begin, end in pairwise(_ENDS):
            if number < end:
                return begin + self.within("n", number - begin, end - begin)
        # Of a numeric with very many digits: the last ones are replaced.
        high, low = divmod(number, _LARGE)
        return high * _LARGE + self.within("n", low, _LARGE)

    def fraction(self, digits: str) -> str:
        """Return the replacement of the digits behind a point; zeros at the end stay."""
        text = digits.rstrip("0")
        if not text:
            return digits
        # The last digit is no zero, so it has nine values.
        number = int(text[:-1] or "0") * 9 + int(text[-1]) - 1
        found, last = divmod(self.within("f", number, 9 * 10 ** (len(text) - 1)), 9)
        before = str(found).zfill(len(text) - 1) if len(text) > 1 else ""
        return f"{before}{last + 1}".ljust(len(digits), "0")

    def hexadecimal(self, text: str) -> str:
        """Return the replacement of a text in which only hexadecimal digits, in lower case, are replaced."""
        return self._replaced(text, [_HEX if char in "0123456789abcdef" else None for char in text])

    def bits(self, text: str) -> str:
        """Return the replacement of a text of zeros and ones."""
        return self._replaced(text, [_BIT if char in "01" else None for char in text])

    def text(self, text: str) -> str:
        """Return the replacement of a text: letters and digits are replaced, all else in ASCII stays."""
        return self._short_text(text) if len(text) <= _LONGEST else self._text(text)

    def _text(self, text: str) -> str:
        return self._replaced(text, [_alphabet(char) for char in text])

    def _replaced(self, text: str, alphabets: list[Alphabet | None]) -> str:
        chars = list(text)
        at = [index for index, alphabet in enumerate(alphabets) if alphabet is not None]
        sizes = [alphabet.size for alphabet in alphabets if alphabet is not None]
        numbers = [alphabet.index(char) for alphabet, char in zip(alphabets, text, strict=True) if alphabet is not None]
        if len(at) > _LONGEST:
            stream = shake_256(self._key + text.encode()).digest(4 * len(at))
            words = memoryview(stream).cast("I")
            numbers = [word % size for word, size in zip(words, sizes, strict=True)]
        else:
            numbers = self._mixed(numbers, sizes)
        for index, number in zip(at, numbers, strict=True):
            alphabet = alphabets[index]
            assert alphabet is not None, "only these were numbered"
            chars[index] = alphabet.char(number)
        return "".join(chars)

    def _mixed(self, numbers: list[int], sizes: list[int]) -> list[int]:
        """Return the replacement of digits, each with its base."""
        whole, size = 0, 1
        for number, base in zip(numbers, sizes, strict=True):
            whole, size = whole * base + number, size * base
        whole = self.within("t", whole, size) if size > 1 else whole
        found = []
        for base in reversed(sizes):
            whole, digit = divmod(whole, base)
            found.append(digit)
        return found[::-1]
