"""Decisions of the engine, without I/O, clock, task or future: the same events in the same order have the same effects.

```text
            events, now_s                                       effects, answers
 reads ───────────────►┌──────────────────────────────────────┐──────────────► start this batch on that worker
 executed, committed ─►│ intake            what enters, when  │──────────────► commit, yield or give back
 a worker asks ───────►│ flight            who starts, whose  │──────────────► close the open batch, ask again at T
 a look at the target ►│ durability        what is reported   │──────────────► write the watermark, report an LSN
 time passes ─────────►│ stalls, workers   who is in the way  │──────────────► roll back, open or close a worker
                       └──────────────────────────────────────┘
                         state: all of it that others may see
```

`runtime/` brings the events and performs the effects.
"""
