"""What the server measures of a round: inner products and sums over devices, bounded by the defences."""
