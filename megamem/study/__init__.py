"""Families of runs: a grid in one YAML file, trained, read in several ways, collected into tables and pictures."""
