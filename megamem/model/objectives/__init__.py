"""Objectives: what a model is trained to predict, one file each.

The registry of objectives imports every module of this package.
"""
