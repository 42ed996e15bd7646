"""The report on one or several runs as one HTML file, which opens offline and loads nothing from the network."""

from .build import build_page as build_page
from .build import save_page as save_page

__all__ = ["build_page", "save_page"]
