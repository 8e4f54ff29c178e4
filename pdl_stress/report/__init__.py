"""One result in, every format out. Nothing here knows how the result came about."""

from .json_file import to_json, write_json
from .load import load_json
from .table import founding_table, print_cases, render

__all__ = ["founding_table", "load_json", "print_cases", "render", "to_json", "write_json"]
