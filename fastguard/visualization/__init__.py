"""Figures of a run as `plotly.graph_objects.Figure`, for notebooks, Streamlit, trackers and pages.

Needs plotly: `pip install fastguard[report]`. Every function takes a guard, a `TrainingHistory`, the path of a log, or
several of them in a list, or in a dict with their labels.
"""

from .layers import plot_activations as plot_activations
from .layers import plot_gradient_flow as plot_gradient_flow
from .layers import plot_layers as plot_layers
from .steps import plot_clip_rate as plot_clip_rate
from .steps import plot_gradient_norm as plot_gradient_norm
from .steps import plot_learning_rate as plot_learning_rate
from .steps import plot_loss as plot_loss
from .steps import plot_loss_scale as plot_loss_scale
from .steps import plot_lr_finder as plot_lr_finder
from .steps import plot_updates as plot_updates

__all__ = ["plot_activations", "plot_clip_rate", "plot_gradient_flow", "plot_gradient_norm", "plot_layers",
           "plot_learning_rate", "plot_loss", "plot_loss_scale", "plot_lr_finder", "plot_updates"]  # fmt: skip
