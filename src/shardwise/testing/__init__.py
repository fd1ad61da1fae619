"""Instruments for tests: ranks as threads, small models, deferred lanes."""
