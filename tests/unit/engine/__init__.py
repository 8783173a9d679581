"""Tests of `src/parapply/engine`."""
