"""The comparison of a cut-over: while clients still write, and once they cannot.

In: the configuration of the stream that runs. Out: lines, and an error where the sides differ.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Final, Literal

import click

from parapply.amounts import few
from parapply.errors import ParapplyError
from parapply.verify import command as verifying

if TYPE_CHECKING:
    from collections.abc import Callable

    from parapply.config import Config

#: Ranges of each table, of about 10,000 rows each; both sides read them in a few hundredths of a second.
_SAMPLED_RANGES: Final = 2
#: Seconds that the daemon may pause for a comparison before the fence, which needs a moment without old writers.
_BEFORE_PAUSE_S: Final = 3.0
#: Seconds that the comparison after the fence takes, about, where the same was compared before.
_COMPARED_S: Final = 0.5


class CutoverComparison:
    """Compares the tables of a stream."""

    def __init__(
        self, config: Config, depth: Literal["none", "sampled", "whole"], timeout_s: float, warn: Callable[[str], None]
    ) -> None:
        self._config, self._depth, self._timeout_s, self._warn = config, depth, timeout_s, warn
        #: Result of the comparison while clients still wrote.
        self._before: verifying.VerifyResult | None = None
        #: Opened after it, so that clients wait for no connection; None if that failed. Closed by the stack.
        self._ends: verifying.EndsAtRest | None = None
        self._stack = AsyncExitStack()

    async def close(self) -> None:
        """Close the sessions."""
        await self._stack.aclose()

    async def before(self) -> None:
        """Compare while clients still write, so that they need not wait for differences that are found now.

        Raises:
            ParapplyError: a table differs, or it would fail again after the fence.
        """
        if self._depth != "sampled":
            return
        began_s = time.monotonic()
        how = verifying.VerifyOptions(
            sampled_ranges=_SAMPLED_RANGES, is_brief=True, allows_none=True, max_pause_s=_BEFORE_PAUSE_S,
            timeout_s=self._timeout_s,
        )  # fmt: skip
        try:
            found = await verifying.comparison(self._config, how)
        except ParapplyError as error:
            if type(error) is not ParapplyError:
                # It would come again after the fence, where clients wait.
                raise
            # Not in time. All of it is compared after the fence, then.
            self._warn(f"not compared before the fence: {error}")
            return
        verifying.say_all(found)
        if any(verdict.found for verdict in found.verdicts):
            raise _differ()
        if unknown := [verdict.why_not for verdict in found.verdicts if verdict.why_not]:
            self._warn(f"not compared before the fence: {few(unknown)}")
            return
        if found.verdicts:
            click.echo(f"compared before the fence ({time.monotonic() - began_s:.3f} s)")
        self._before = found
        with suppress(ParapplyError):  # the comparison after the fence opens others, and can name the error
            self._ends = await self._stack.enter_async_context(verifying.ends_at_rest(self._config, self._how))

    @property
    def _how(self) -> verifying.VerifyOptions:
        n_ranges = _SAMPLED_RANGES if self._depth == "sampled" else 0
        return verifying.VerifyOptions(sampled_ranges=n_ranges, allows_none=True, timeout_s=self._timeout_s)

    async def after(self, at_lsn: int) -> str:
        """Compare once no client writes and all up to an LSN is applied, and return the result for people.

        Raises:
            ParapplyError: a table differs, or it took too long.
        """
        if self._depth == "none":
            return "left out (--verify none)"
        again = None if self._before is None else verifying.VerifyAgain(self._before, _COMPARED_S)
        found = None if again is None else await self._at_rest(again, at_lsn)
        if found is None:
            found = await verifying.comparison(self._config, self._how, again)
        verifying.say_all(found)
        if not found.is_equal:
            raise _differ()
        if not found.verdicts:
            return "nothing, for no table is published"
        n_left = sum(verdict.equal_at is not None for verdict in found.verdicts)
        left = f"; {n_left} tables as before the fence" if n_left else ""
        return f"equal ({self._depth}){left}"

    async def _at_rest(self, again: verifying.VerifyAgain, at_lsn: int) -> verifying.VerifyResult | None:
        """Compare without the daemon; None if that was not possible, or a late transaction may be the difference."""
        if self._ends is None:
            return None
        try:
            found = await self._ends.comparison(again, at_lsn)
        except ParapplyError as error:
            self._warn(f"compared by new sessions: {error}")
            return None
        finally:
            # Sessions with such a name are ended before the takeover.
            await self._stack.aclose()
        if not found.is_equal:
            self._warn("compared again, at one LSN")
            return None
        return found


def _differ() -> ParapplyError:
    words = "source and target differ, or are not compared; see above"
    return ParapplyError(words, hint="mend the target (`parapply verify`)")
