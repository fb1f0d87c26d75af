"""Benchmarks that `hymo bench` runs: ours beside what else is installed, with the error beside every time."""
