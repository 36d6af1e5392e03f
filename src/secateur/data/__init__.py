"""Real data sets in their public layouts, and how they are split and partitioned."""
