"""Random tables and transactions: what parallel apply leaves must equal what the built-in subscription leaves."""
