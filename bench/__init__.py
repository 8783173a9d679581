"""Micro-benchmarks, run from the checkout, and the results of all benchmarks; `parapply bench` is in the package."""

from __future__ import annotations
