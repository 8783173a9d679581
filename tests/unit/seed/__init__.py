"""Tests of `src/parapply/plan`."""
