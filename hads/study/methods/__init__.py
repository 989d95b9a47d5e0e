"""The methods that a study compares."""
