"""Tests of `src/parapply/verify`."""
