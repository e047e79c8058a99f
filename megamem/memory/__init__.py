"""Mixers: attention and memory mechanisms behind one contract (`base.py`), one file each.

Importing this package registers every mechanism in it: a new one is a new file here.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
