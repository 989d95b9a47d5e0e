"""Races of sparse and dense attention, which tell the policy of HADS where sparse attention pays."""
