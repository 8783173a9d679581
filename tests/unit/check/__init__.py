"""Tests of `src/parapply/check`."""
