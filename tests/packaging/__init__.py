"""Distribution: archives, packages, manifests."""
