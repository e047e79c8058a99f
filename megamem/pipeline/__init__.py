"""Schedules over (sequence, chunk) units."""
