"""Files that commands read and write, checked before a model is loaded for them."""

from __future__ import annotations

import os
from pathlib import Path

from overspill.errors import UserError
from overspill.gguf import GgufFile, open_gguf
from overspill.models.check import require_tokenizer


def open_for_text(path: Path) -> GgufFile:
    """An open model file that text can go into."""
    file = open_gguf(path)
    require_tokenizer(file)
    return file


def check_writable(flag: str, path: Path) -> None:
    """`UserError` when a file that will be written at the end cannot be."""
    if path.is_dir():
        raise UserError(f"{flag} {path}: is a directory; give the name of a file")
    if not path.parent.is_dir():
        raise UserError(f"{flag} {path}: there is no directory {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{flag} {path}: cannot be written; choose another place")
