"""Checkpoints: whole or invisible, verified, loadable at any stage and any number of ranks. See docs/checkpoints.md."""
