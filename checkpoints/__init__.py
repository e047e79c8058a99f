"""Saved models."""
