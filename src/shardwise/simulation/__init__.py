"""Runs of one case on ranks that are threads of this process, beside the same case without sharding."""
