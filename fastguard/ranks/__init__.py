"""Process groups: measures gradients over all ranks, so that every rank makes the same decision."""

from .exchange import as_everywhere as as_everywhere
from .exchange import gradients_over_ranks as gradients_over_ranks
from .exchange import measured as measured
from .exchange import norm_over_ranks as norm_over_ranks
from .exchange import tensors_over_ranks as tensors_over_ranks
from .local import LocalGradients as LocalGradients
from .local import local_gradients as local_gradients
from .parity import AlikeSettings as AlikeSettings
from .parity import Parity as Parity
from .parity import alike_settings as alike_settings
from .ranks import Ranks as Ranks
from .ranks import Shared as Shared
from .ranks import ranks_over as ranks_over
from .ranks import with_bad_step as with_bad_step
from .shards import compares_ranks as compares_ranks
from .shards import has_other_ranks as has_other_ranks
from .shards import is_sharded as is_sharded
from .shards import locals_of as locals_of
from .shards import num_averaged as num_averaged
from .shards import refuse_sharding_model as refuse_sharding_model
from .shards import refuse_shards as refuse_shards
