"""The graph passes, which turn a captured graph into a quantized one.

The folder lies at the top of the repository so that it is easy to find, and ships as `cpt_fx.passes`.
Import it under that name only: under a second name every class in it would exist twice, and
`isinstance` would fail between the two.
"""

if __name__ != "cpt_fx.passes":
    raise ImportError(
        f"the folder passes/ is the package 'cpt_fx.passes' and was imported as {__name__!r}; "
        "write 'import cpt_fx.passes' (or 'from cpt_fx.passes import ...')",
        name=__name__,
    )

from cpt_fx.ir.pass_base import Pass, Report
from cpt_fx.passes.annotate import Annotate
from cpt_fx.passes.bind import Bind
from cpt_fx.passes.decompose import Decompose
from cpt_fx.passes.insert import Insert
from cpt_fx.passes.lower import Lower
from cpt_fx.passes.normalize import Normalize
from cpt_fx.passes.share import Share
from cpt_fx.passes.verify import Verify

__all__ = ["Annotate", "Bind", "Decompose", "Insert", "Lower", "Normalize", "Pass", "Report", "Share", "Verify"]
