"""What a run does to memory, moment by moment: one time axis for bytes, communication and compute."""
