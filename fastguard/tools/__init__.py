"""The toolkit: what works without a guard."""

from .allocator import KeptMemory as KeptMemory
from .allocator import keep_memory as keep_memory
