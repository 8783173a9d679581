"""The fault campaign and the soak: programs for a person, built on the fixtures of the test suite."""
