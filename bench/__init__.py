"""Benchmarks: `python -m bench` from the checkout. Figures go to `bench/results`; no other place states any."""

from __future__ import annotations
