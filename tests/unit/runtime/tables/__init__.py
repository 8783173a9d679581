"""Tests of `src/parapply/runtime/tables`."""
