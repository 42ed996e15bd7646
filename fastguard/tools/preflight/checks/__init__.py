"""What is checked before a training begins: one family of checks a file."""

from . import data as data
from . import fit as fit
from . import loss as loss
from . import modes as modes
from . import output as output
from . import parameters as parameters
from . import settings as settings
from . import start as start
