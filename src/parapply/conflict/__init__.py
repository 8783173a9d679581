"""Changes that meet other rows on the target than on the publisher: what they are, what is done, what is kept."""
