"""`parapply check`: what would make `init`, the copy or the stream fail or hurt, found before anything is made."""
