"""Process groups: measures gradients over all ranks, so that every rank makes the same decision."""

from .flat import flat_shards as flat_shards
from .local import LocalGradients as LocalGradients
from .local import local_gradients as local_gradients
from .local import with_bad_step as with_bad_step
from .parity import AlikeSettings as AlikeSettings
from .parity import Parity as Parity
from .parity import alike_settings as alike_settings
from .pieces import as_everywhere as as_everywhere
from .pieces import gradients_over_ranks as gradients_over_ranks
from .pieces import measured as measured
from .pieces import norm_over_ranks as norm_over_ranks
from .pieces import tensors_over_ranks as tensors_over_ranks
from .ranks import Ranks as Ranks
from .ranks import Shared as Shared
from .shards import is_sharded as is_sharded
from .shards import local_of as local_of
from .shards import locals_of as locals_of
from .unsharded import compares_ranks as compares_ranks
from .unsharded import copies_of as copies_of
from .unsharded import has_other_ranks as has_other_ranks
from .unsharded import num_averaged as num_averaged
