"""Sinks: where a run's metrics go."""
