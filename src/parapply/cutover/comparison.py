"""The comparison of a cut-over: while clients still write, and once they cannot.

In: the configuration of the stream that runs. Out: lines, and an error where the sides differ.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Literal

import click

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
_COMPARED_S: Final = 1.0


class CutoverComparison:
    """Compares the tables of a stream."""

    def __init__(
        self,
        config: Config,
        depth: Literal["none", "sampled", "whole"],
        timeout_s: float,
        warn: Callable[[str], None],
    ) -> None:
        self._config, self._depth, self._timeout_s, self._warn = config, depth, timeout_s, warn
        #: Result of the comparison while clients still wrote.
        self._before: verifying.VerifyResult | None = None

    async def before(self) -> None:
        """Compare while clients still write, so that they need not wait for differences that are found now.

        Raises:
            ParapplyError: a table differs, or it would fail again after the fence.
        """
        if self._depth != "sampled":
            return
        began_s = time.monotonic()
        how = verifying.VerifyOptions(
            sampled_ranges=_SAMPLED_RANGES,
            is_brief=True,
            max_pause_s=_BEFORE_PAUSE_S,
            timeout_s=self._timeout_s,
        )
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
        if not found.is_equal:
            raise _differ()
        click.echo(f"compared before the fence ({time.monotonic() - began_s:.3f} s)")
        self._before = found

    async def after(self) -> str:
        """Compare once no client writes, and return the result for people.

        Raises:
            ParapplyError: a table differs, or it took too long.
        """
        if self._depth == "none":
            return "left out (--verify none)"
        is_sampled = self._depth == "sampled"
        how = verifying.VerifyOptions(sampled_ranges=_SAMPLED_RANGES if is_sampled else 0, timeout_s=self._timeout_s)
        before = self._before
        again = None if before is None else verifying.VerifyAgain(before, _COMPARED_S)
        found = await verifying.comparison(self._config, how, again)
        verifying.say_all(found)
        if not found.is_equal:
            raise _differ()
        n_left = sum(verdict.equal_at is not None for verdict in found.verdicts)
        left = f"; {n_left} tables as before the fence" if n_left else ""
        return f"equal ({self._depth}){left}"


def _differ() -> ParapplyError:
    return ParapplyError("source and target differ; see above", hint="mend the target (`parapply verify`)")
