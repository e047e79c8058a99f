"""Tests, importable as a package so that they share helpers."""
