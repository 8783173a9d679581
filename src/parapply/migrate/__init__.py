"""A migration from the first look to the cut-over, in steps that can be run alone and again."""
