"""Reading, summarising and exporting the records of runs."""
