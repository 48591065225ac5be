"""What a file that is not GGUF seems to be, so that the message can say what to do about it."""

from __future__ import annotations

MAGIC = b"GGUF"
_OLD = "is a GGML file from before GGUF ({}), which is not supported; convert the model again"
_HTML = "is a web page, not a GGUF file; the download link led to a page: fetch the file itself"
_PREFIXES = (
    (b"tjgg", _OLD.format("GGJT")),
    (b"ggjt", _OLD.format("GGJT")),
    (b"fmgg", _OLD.format("GGMF")),
    (b"ggmf", _OLD.format("GGMF")),
    (b"lmgg", _OLD.format("GGML")),
    (b"algg", _OLD.format("GGLA")),
    (b"version https://git-lfs", "is a Git LFS pointer, not a GGUF file; fetch the file itself with 'git lfs pull'"),
    (b"PK\x03\x04", "is a zip or PyTorch file, not a GGUF file; convert the model to GGUF"),
    (b"\x1f\x8b", "is a gzip file, not a GGUF file; unpack it"),
)


def describe(head: bytes) -> str:
    """The message for a file that begins with `head` (some dozen bytes, or all of a shorter file)."""
    if not head:
        return "is empty, too short for a GGUF file; fetch it again"
    if len(head) < len(MAGIC):
        return f"is too short, not a GGUF file: {len(head)} bytes; fetch it again"
    for prefix, message in _PREFIXES:
        if head.startswith(prefix):
            return message
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return _HTML
    if len(head) > 8 and head[8:9] == b"{":
        return "is a safetensors file, not a GGUF file (no GGUF magic); convert the model to GGUF"
    return f"is not a GGUF file: it begins with {head[:4]!r} in place of the magic {MAGIC!r}"
