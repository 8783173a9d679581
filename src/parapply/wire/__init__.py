"""Bytes from the publisher to messages. No I/O, no clocks.

Modules that others may use:

* `frames`: contents of a walsender's CopyData message, and the status update that goes back;
* `decode`: the complete, checked decoder of every pgoutput message, protocol versions 1 to 4;
* `messages`: the types it returns.

Nothing is re-exported here: a function `decode` in this namespace would hide the module of that name.
"""
