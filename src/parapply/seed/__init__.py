"""A physical copy of the publisher becomes a target, and joins the slot exactly where its recovery ended."""
