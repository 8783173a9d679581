"""Runs when a daemon of the campaign starts with this folder on its path: breaks it as FAULTS_MUTANT says."""

from __future__ import annotations

import os

if os.environ.get("FAULTS_MUTANT"):
    from tests.faults import mutants

    mutants.MUTANTS[os.environ["FAULTS_MUTANT"]].break_it()
