"""State and verbs: ``bucket`` (buffers), ``unit`` (what is gathered together), ``runtime`` (events to verbs)."""
