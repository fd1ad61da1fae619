"""Training a causal language model from a configuration: what a rank of ``shardwise train`` does. Read ``loop.py``."""
