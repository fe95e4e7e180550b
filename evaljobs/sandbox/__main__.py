"""`python -m evaljobs.sandbox`: see `cli`."""

import sys

from evaljobs.sandbox.cli import main

sys.exit(main())
