"""``python -m pararnn``: the same as the ``pararnn`` command."""

import sys

from .cli import main

sys.exit(main())
