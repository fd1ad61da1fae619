"""Adapters between torch optimizers and the flat shards."""
