"""Weights and updates: sampled around a guard's steps, and as a table to print."""

from .sampler import Sample as Sample
from .sampler import WeightSampler as WeightSampler
from .settings import sampler_settings as sampler_settings
from .table import GradientTable as GradientTable
from .table import check_gradients as check_gradients
