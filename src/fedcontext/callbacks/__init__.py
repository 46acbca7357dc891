"""What follows a run while it goes on: progress and trackers."""
