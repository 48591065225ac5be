"""What a user can do something about.

Every error that bad input can cause is a `UserError`: one line that names the file, key, tensor or flag, what
was found and what to do. The command line prints it and exits with code 2, the server answers with HTTP 4xx.
Anything else that escapes is a fault of ours and keeps its traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """Bad input: a file, a flag or a request that cannot be served as it stands."""


class OutOfMemory(UserError):
    """A device cannot hold what was asked of it; the message names the device, the need and what is free."""
