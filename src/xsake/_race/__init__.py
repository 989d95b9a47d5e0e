"""Races between implementations of attention: cases, contestants, turns on a chip at its power cap."""
