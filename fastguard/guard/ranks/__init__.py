"""Process groups: what of the gradients is reduced over them, and by whom, so that every rank decides alike."""

from .parity import Parity as Parity
from .ranks import Ranks as Ranks
from .ranks import Shared as Shared
from .shards import is_sharded as is_sharded
from .shards import local_of as local_of
from .shards import locals_of as locals_of
from .totals import as_everywhere as as_everywhere
from .totals import norm_over_ranks as norm_over_ranks

__all__ = ["Parity", "Ranks", "Shared", "is_sharded", "local_of", "locals_of", "as_everywhere", "norm_over_ranks"]
