"""Doors of the checkpoint format: exports for other libraries, and imports from them. One file per format."""
