"""Weights and updates: sampled around a guard's steps, and as a table to print."""

from .collector import WeightCollector as WeightCollector
from .collector import sampler_settings as sampler_settings
from .sampler import WeightSampler as WeightSampler
from .table import GradientTable as GradientTable
from .table import check_gradients as check_gradients
