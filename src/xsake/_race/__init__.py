"""Races between implementations of attention: courses, contestants, turns on a chip at its power cap."""
