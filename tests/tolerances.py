"""Every tolerance of the kernel tests, each with its reason."""

# Relative error of a norm against float64. The contract; the worst case of the fast loop is 3e-7: one rounding of a
# float32 square and fifteen additions that all round the same way.
NORM = 1e-6

# The same for what is summed in float64 from exact products: float64 input, tails and redone blocks.
NORM_EXACT = 1e-14

# Error of a sum of x^p other than the squares, relative to the sum of |x|^p: sixteen float32 additions a lane, as
# above.
SUM = 1e-6

# Relative error of an activation's standard deviation, however large its mean: deviations from a value within the data
# are squared in float32 and added sixteen at a time, half of NORM; a block whose mean lies more than three deviations
# from that value, where the subtraction of two sums would cost more than a factor of ten, is read again in float64.
ACTIVATION_STD = 3e-6

# Error of an activation's mean, relative to the standard deviation: the same additions.
ACTIVATION_MEAN = 3e-6

# Relative error of a channel's sum of magnitudes: sixteen float32 additions of numbers of one sign.
SUM_ABS = 1e-6
