"""The leaderboard: algorithms tuned on some seeds and compared on others, and what it recommends."""
