"""Tensors to hold the kernels against: odd sizes, odd layouts, nasty values."""

import torch

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)

# Around the 16 lanes of the exact loop, the 32 of the fast one, its least size of 256, a run of 512, a block of 4096,
# a chunk of 65536, and several chunks.
_SMALL = (0, 1, 2, 7, 15, 16, 17, 31, 33, 255, 256, 257, 287, 288, 511, 512, 1000)
SIZES = (*_SMALL, 4095, 4096, 4097, 8192, 65535, 65536, 65537, 200_003)

NASTY = {
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "zero": 0.0,
    "-zero": -0.0,
    "tiny": 1e-30,
    "float32 subnormal": 1e-40,
    "float16 subnormal": 3e-7,
    "float16 max": 65504.0,
    "huge": 3e38,
}

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "every second": lambda x: x[::2],
    "every second, innermost": lambda x: x[..., ::2],
    "both": lambda x: x[1::3, ..., ::2],
    "permuted and sliced": lambda x: x.permute(2, 0, 3, 1)[:, 1:, :, :-1],
    "offset": lambda x: x.reshape(-1)[5:-3],
    "one element of size-1 dimensions": lambda x: x[2:3, 1:2, 3:4, 1:2],
    "expanded": lambda x: x[:1].expand(4, -1, -1, -1),
    "expanded scalar": lambda x: x.reshape(-1)[3].expand(40, 50),
    "unfolded": lambda x: x.reshape(-1).unfold(0, 8, 3),
    "0-dim": lambda x: x.reshape(-1)[7],
    "no elements": lambda x: x[:0],
}


def image(dtype, shape=(8, 23, 14, 15)):
    """A 4-dimensional tensor of 38 640 elements for the layouts to act on."""
    return torch.randn(shape, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)


def nasty(value, dtype, size=20_000):
    """Normal values among which `value` stands alone, in a run, in the first and in the last place."""
    x = torch.randn(size).to(dtype)
    rounded = torch.tensor(value, dtype=torch.float64).to(dtype)  # an older torch refuses a number that overflows
    for where in (0, size // 3, slice(size // 2, size // 2 + 9), size - 1):
        x[where] = rounded
    return x
