"""`python -m numba_attn COMMAND`."""

import sys

from numba_attn.cli import main

sys.exit(main())
