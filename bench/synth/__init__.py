"""Apply logs of a stated shape, for trying the report without servers."""
