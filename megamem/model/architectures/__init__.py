"""Architectures: how layers, output head and memories that span the model make a model, one file each.

The registry of architectures imports every module of this package.
"""
