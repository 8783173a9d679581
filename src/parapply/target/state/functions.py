"""What the state schema offers in SQL besides its tables: `wait_for`, and who may read.

In: the schema's name. Out: SQL to run when the schema is made. Source: PostgreSQL manual, "Function Volatility
Categories": each statement of a volatile function sees what has committed since, under READ COMMITTED.
"""

from __future__ import annotations

from psycopg import sql

from parapply.target.state.commands import COLUMNS_WITHOUT_COMMANDS
from parapply.target.state.conflict_tables import CONFLICT_COLUMNS_WITHOUT_VALUES

#: Seconds between two checks of the progress.
_POLL_S = 0.02

_BODY = """
DECLARE
    deadline timestamptz := clock_timestamp() + timeout_s * interval '1 second';
    reached pg_lsn;
    n_slots bigint;
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION 'wait_for sees no progress under %', current_setting('transaction_isolation')
            USING ERRCODE = 'invalid_transaction_state', HINT = 'call it before the transaction that reads';
    END IF;
    LOOP
        SELECT count(*), min(p.lowest_remote_lsn) INTO n_slots, reached
          FROM {s}.progress AS p WHERE slot IS NULL OR p.slot_name = slot;
        IF n_slots <> 1 THEN
            RAISE EXCEPTION 'wait_for needs one slot, there are %', n_slots
                USING ERRCODE = 'undefined_object', HINT = 'name it: wait_for(lsn, timeout_s, slot)';
        END IF;
        -- As plan/watermark.py: nothing ends within the header of a page that is not written yet.
        IF lsn - reached <= (CASE (reached - '0/0') % 1048576 WHEN 0 THEN 40 ELSE 24 END) THEN
            RETURN true;
        END IF;
        IF clock_timestamp() >= deadline THEN
            RETURN false;
        END IF;
        PERFORM pg_sleep({poll});
    END LOOP;
END"""

_COMMENT = (
    "Read your writes: true as soon as the target has everything up to an LSN of the publisher, false after timeout_s. "
    "The slot may be left out if there is only one."
)


def functions(schema: str) -> sql.Composed:
    """Return the statements that make the functions and let monitoring roles read everything here."""
    name = sql.Identifier(schema)
    body = sql.SQL(_BODY).format(s=name, poll=sql.Literal(_POLL_S)).as_string(None)
    columns = sql.SQL(", ").join(map(sql.Identifier, CONFLICT_COLUMNS_WITHOUT_VALUES))
    of_ddl = sql.SQL(", ").join([sql.Identifier(one) for one in COLUMNS_WITHOUT_COMMANDS])
    return sql.SQL(
        "CREATE OR REPLACE FUNCTION {s}.wait_for(lsn pg_lsn, timeout_s double precision DEFAULT 30,"
        " slot text DEFAULT NULL) RETURNS boolean LANGUAGE plpgsql VOLATILE"
        " SET search_path = pg_catalog, pg_temp AS {body};"
        "COMMENT ON FUNCTION {s}.wait_for IS {comment};"
        "GRANT USAGE ON SCHEMA {s} TO pg_monitor; GRANT SELECT ON ALL TABLES IN SCHEMA {s} TO pg_monitor;"
        # The tables with values, so they are readable only by those who are granted it.
        "REVOKE SELECT ON {s}.conflicts FROM pg_monitor;"
        "GRANT SELECT ({columns}) ON {s}.conflicts TO pg_monitor;"
        "REVOKE SELECT ON {s}.ddl FROM pg_monitor; GRANT SELECT ({of_ddl}) ON {s}.ddl TO pg_monitor;"
    ).format(s=name, body=sql.Literal(body), comment=sql.Literal(_COMMENT), columns=columns, of_ddl=of_ddl)
