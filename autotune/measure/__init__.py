"""What a candidate is put through: compiled, raced, verified."""
