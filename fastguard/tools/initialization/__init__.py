"""Are the weights of a new model of the right size? Against what He, Xavier and LeCun would have chosen."""

from .check import InitializationReport as InitializationReport
from .check import check_initialization as check_initialization
from .check import stable_weight_init as stable_weight_init
