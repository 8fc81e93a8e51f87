"""`python -m cpt_fx` is `cpt-fx`."""

import sys

from cpt_fx.cli import main

sys.exit(main())
