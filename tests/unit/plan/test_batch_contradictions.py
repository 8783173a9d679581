"""Changes of one key that contradict each other, every sequence of up to five: given up, or refused by the target."""

from __future__ import annotations

import itertools

import pytest

from parapply.model import Transaction
from parapply.plan.batch import Batch
from parapply.plan.table import Plans
from tests import build
from tests.unit.changes_model import NUMERIC, PLAIN, Refused, Side, Spec
from tests.unit.changes_stream import Publisher

ONE = b"1"

SEQUENCES = [letters for length in range(1, 6) for letters in itertools.product("IUD", repeat=length)]


def _of_one_key(letters: tuple[str, ...], spec: Spec, number: int = 0) -> list[bytes]:
    """Return the frames of inserts, updates and deletes of one key, possible or not; each in another text of it."""
    frames = []
    for position, letter in enumerate(letters):
        forms = spec.keys[number]
        texts = [build.text(text) for text in forms[position % len(forms)]]
        new = build.row(*texts, build.text(b"%d" % position), build.text(ONE))
        old = build.row(*texts, build.null(), build.null())
        payload = {
            "I": build.insert(new, oid=spec.oid),
            "U": build.update(new, oid=spec.oid),
            "D": build.delete(key=old, oid=spec.oid),
        }[letter]
        frames.append(build.xlog_data(payload))
    return frames


@pytest.mark.parametrize("is_there", [False, True], ids=["absent", "present"])
@pytest.mark.parametrize("spec", [PLAIN, NUMERIC], ids=["bytes", "numeric"])
def test_a_contradiction_is_never_hidden(*, is_there: bool, spec: Spec) -> None:
    """Every sequence on one key is applied exactly, or refused by the target, or given up as a set before."""
    for letters in SEQUENCES:
        frames = _of_one_key(letters, spec)
        serial, target = Side((spec,)), Side((spec,))
        if not is_there:
            serial.truncate(spec.oid)
            target.truncate(spec.oid)
        plans = Plans()
        plans.current[spec.oid] = spec.plan(0)
        transaction = Transaction(1, 1, 1)
        transaction.changes += frames
        batch = Batch(1)
        batch.add(transaction, plans)
        try:
            for frame in frames:
                serial.apply(frame, spec.relation(0))
        except Refused:
            if not batch.is_suspect:
                with pytest.raises(Refused):
                    target.apply_batch(batch)
        else:
            target.apply_batch(batch)
            assert target == serial, letters


def test_what_no_row_could_have_gone_through_is_suspect() -> None:
    """Exactly the sequences that no state of the target allows are given up before they are sent."""
    for letters in SEQUENCES:
        plans = Plans()
        plans.current[PLAIN.oid] = PLAIN.plan(0)
        transaction = Transaction(1, 1, 1)
        transaction.changes += _of_one_key(letters, PLAIN)
        batch = Batch(1)
        batch.add(transaction, plans)
        is_possible = not any(pair in ("II", "UI", "DU", "DD") for pair in map("".join, itertools.pairwise(letters)))
        assert batch.is_suspect is not is_possible, letters


def test_relations_announced_after_a_contradiction_count() -> None:
    """Giving up sets in the middle of a transaction does not lose what it announces later."""
    publisher = Publisher((PLAIN,))
    plan = PLAIN.plan(1)
    publisher.plans.known[plan.relation] = plan
    publisher.plans.current[PLAIN.oid] = PLAIN.plan(0)
    transaction = Transaction(1, 1, 1)
    transaction.changes += [*_of_one_key(("D", "D"), PLAIN), plan.relation]
    batch = Batch(1)
    batch.add(transaction, publisher.plans)
    assert batch.is_suspect
    assert publisher.plans.current[PLAIN.oid] is plan
