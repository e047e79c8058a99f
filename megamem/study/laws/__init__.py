"""Scaling laws fitted to a study's losses."""
