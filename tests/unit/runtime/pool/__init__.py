"""Tests of `src/parapply/runtime/pool`."""
