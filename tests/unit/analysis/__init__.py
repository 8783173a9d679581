"""Tests of `src/parapply/analysis`."""
