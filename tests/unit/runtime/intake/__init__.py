"""Tests of `src/parapply/runtime/intake`."""
