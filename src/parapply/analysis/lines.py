"""Lines of the apply log as rows: what each is, and why a line is none.

In go lines (the view `engine.LINES`); out comes a row for each line with its kind (`batch`, `transaction`, `interval`
or `bad`), the day and the file. A torn, foreign or newer line is a row of the kind `bad` with a reason; nothing raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from parapply.analysis.engine import LINES
from parapply.analysis.schema import BAD, DAY, FILE, KIND, REASON, TORN, required_of, wide_columns
from parapply.applylog_schema import READABLE_VERSIONS, RECORDS

if TYPE_CHECKING:
    from parapply.analysis.schema import TypeWords

#: Fields that are sums in the figures: one below 0 would be taken off what other records say.
_COUNTED: Final = (
    "n_transactions", "n_changes", "size_bytes", "queued_s", "wait_dependency_s", "execute_s", "wait_turn_s",
    "commit_s",
)  # fmt: skip
#: Characters of a bad line that are kept: enough to see what it is.
_SHOWN_CHARACTERS: Final = 200


def records(words: TypeWords) -> str:
    """Return the query that says of each line what it is.

    It has the columns of `schema.stored_columns` except the load. `KIND` is a kind of record or `BAD`; `REASON` is null
    except for bad lines; `DAY` is the day in UTC of the commit on the target, or of reading for bad lines.
    A line of another program may hold anything, so only its beginning is kept; a record that lacks a field is known by
    its other fields.
    """
    fields = [name for name in wide_columns(words) if name not in (KIND, TORN)]
    return f"""
        SELECT {", ".join(fields)}, substring({TORN}, 1, {_SHOWN_CHARACTERS}) AS {TORN}, {FILE}, {REASON},
               CASE WHEN {REASON} IS NULL THEN {KIND} ELSE '{BAD}' END AS {KIND},
               CASE WHEN {REASON} IS NULL THEN CAST(coalesce(committed_at, ended_at) AS date)
                    ELSE current_date END AS {DAY}
          FROM (SELECT *, CASE {_reasons()} END AS {REASON} FROM {LINES})
        """


def _reasons() -> str:
    """Return the conditions under which a line is no record, each with the reason."""
    kinds = ", ".join(f"'{kind}'" for kind in RECORDS)
    versions = ", ".join(str(version) for version in READABLE_VERSIONS)
    reasons = {
        f"{TORN} IS NOT NULL": "'not a record in JSON, or a field of another type'",
        f"{KIND} IS NULL OR {KIND} NOT IN ({kinds})": "'unknown kind of record'",
        # A record without a version has the first: every record has one, but the rule is the structs'.
        f"coalesce(schema_version, 1) NOT IN ({versions})": (
            "concat('schema version ', CAST(schema_version AS string), ', which this parapply does not read')"
        ),
        **{f"{name} < 0": f"'the field {name} is below 0'" for name in _COUNTED},
        **{
            f"{KIND} = '{kind}' AND {name} IS NULL": f"'a {kind} without the field {name}'"
            for kind, struct in RECORDS.items()
            for name in required_of(struct)
        },
    }
    return " ".join(f"WHEN {condition} THEN {reason}" for condition, reason in reasons.items())
