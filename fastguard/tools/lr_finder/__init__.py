"""The learning-rate range test."""

from .finder import LearningRateFinder as LearningRateFinder
from .result import RangeTest as RangeTest
