"""`parapply check`: reasons why `init`, the copy or the stream would fail or hurt, found before anything is made."""
