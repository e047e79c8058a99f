"""Runs on disk: folder, heartbeat, metrics, status."""
