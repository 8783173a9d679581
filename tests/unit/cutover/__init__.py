"""Tests of `src/parapply/cutover`."""
