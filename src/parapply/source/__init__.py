"""The publisher's end: slot checks and the options of the stream. Knows no SQL of the target."""
