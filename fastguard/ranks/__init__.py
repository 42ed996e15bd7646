"""Process groups: measures gradients over all ranks, so that every rank makes the same decision."""

from .alike import AlikeSettings as AlikeSettings
from .alike import alike_settings as alike_settings
from .ranks import Ranks as Ranks
from .ranks import ranks_over as ranks_over
from .shards import has_other_ranks as has_other_ranks
from .shards import refuse_shards as refuse_shards
