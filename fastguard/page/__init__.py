"""The report of a run, or of several, as one HTML file that opens offline and asks nothing of the network."""

from .build import build_page as build_page
from .build import save_page as save_page

__all__ = ["build_page", "save_page"]
