"""The stress test: methods under faults and attacks, and the page of results."""
