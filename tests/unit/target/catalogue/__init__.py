"""Tests of `src/parapply/target/catalogue`."""
