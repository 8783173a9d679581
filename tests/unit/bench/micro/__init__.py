"""What measures single parts."""
