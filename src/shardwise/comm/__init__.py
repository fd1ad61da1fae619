"""The network: one protocol (``base``), four implementations of it."""
