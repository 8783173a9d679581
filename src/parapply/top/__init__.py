"""`parapply top`: a live screen of one slot. What it shows comes from the state tables, so it runs on any machine."""
