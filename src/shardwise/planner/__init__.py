"""Numbers known before anything is allocated."""
