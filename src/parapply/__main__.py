"""``python -m parapply`` is the command ``parapply``."""

from __future__ import annotations

import sys

from parapply.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
