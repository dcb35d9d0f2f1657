"""What things cost, as ratios against peers measured interleaved in the same run."""
