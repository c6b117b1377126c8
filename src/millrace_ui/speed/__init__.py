"""Where a run is slow, as text and as a page."""
