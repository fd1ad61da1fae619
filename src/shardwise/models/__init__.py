"""Models that ship with the library, for the demo and for benchmarks."""
