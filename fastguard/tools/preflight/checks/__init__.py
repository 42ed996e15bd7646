"""The checks of preflight, one family per file. Importing a file registers its checks."""

from . import data as data
from . import fit as fit
from . import loss as loss
from . import parameters as parameters
from . import start as start
