"""How a run is followed: events, progress, trackers."""
