"""What is given away: archives, packages, manifests."""
