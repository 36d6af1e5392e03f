"""`secateur sweep`: many runs spread over Ray workers, gathered into one folder and one page."""
