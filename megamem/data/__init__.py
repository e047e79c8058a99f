"""Readers, samplers and batches."""
