"""Mixers: attention and memory mechanisms behind one contract (`base.py`), each in the file <family>/<kind>.py.

The registry of mixers imports every module below this package: a new mechanism is a new file in one of the families.
"""
