"""Benchmarks of one part each, run as modules from the top of the checkout: `python -m bench.micro.planner`."""

from __future__ import annotations
