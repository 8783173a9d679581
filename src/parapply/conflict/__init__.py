"""Changes that find other rows on the target than on the publisher: their kinds, their handling, their history."""
