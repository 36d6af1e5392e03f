"""What to remove: masks from scores, filters and gates, and the real removal of channels."""
