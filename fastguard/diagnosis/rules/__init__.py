"""The rules, one file a family. Each registers itself when it is imported."""

from . import data as data
from . import explosion as explosion
from . import loss as loss
from . import loss_validation as loss_validation
from . import lr as lr
from . import nonfinite as nonfinite
from . import units as units
from . import vanishing as vanishing
from . import weights as weights
