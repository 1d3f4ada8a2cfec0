"""Measured figures, each beside what was asked for. Run with ``make bench``."""
