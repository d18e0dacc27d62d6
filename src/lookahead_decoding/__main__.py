"""``python -m lookahead_decoding`` is ``lookahead``."""

from __future__ import annotations

import sys

from lookahead_decoding.cli import main

if __name__ == "__main__":
    sys.exit(main())
