"""Figures of a run as `plotly.graph_objects.Figure`, for notebooks, Streamlit, trackers and pages.

Needs plotly: `pip install fastguard[report]`. Every function takes a guard, a `TrainingHistory`, the path of a log, or
several of them in a list, or in a dict with their labels.
"""

from .figures import plot_activations as plot_activations
from .figures import plot_clip_rate as plot_clip_rate
from .figures import plot_gradient_flow as plot_gradient_flow
from .figures import plot_gradient_norm as plot_gradient_norm
from .figures import plot_layers as plot_layers
from .figures import plot_learning_rate as plot_learning_rate
from .figures import plot_loss as plot_loss
from .figures import plot_loss_scale as plot_loss_scale
from .figures import plot_lr_finder as plot_lr_finder
from .figures import plot_updates as plot_updates

__all__ = ["plot_activations", "plot_clip_rate", "plot_gradient_flow", "plot_gradient_norm", "plot_layers",
           "plot_learning_rate", "plot_loss", "plot_loss_scale", "plot_lr_finder", "plot_updates"]  # fmt: skip
