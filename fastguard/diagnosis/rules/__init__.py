"""The rules, one file a family. Each file here is imported, in the order of the alphabet, and registers its rules.

A file's `TITLE` is what the pages call the family; files share one by the part of their name before an underscore.
"""

import importlib
import pkgutil

for _name in sorted(found.name for found in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_name}")
