"""`parapply top`: a live screen of one slot. It reads the state tables, so it runs on any machine."""
