"""The command ``lookahead``.

Nothing here imports torch before a command needs it, so that ``--help`` and ``--version`` are quick.
"""

from lookahead_decoding.cli.app import main

__all__ = ["main"]
