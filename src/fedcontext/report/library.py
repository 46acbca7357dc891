"""Plotly's script with less to do before the first chart: what it draws stays the same.

Both changes are found by the way that Plotly is bundled (6.0 to 7.1). A text that is bundled otherwise is left as it is:
the page then works as well, and only starts later.
"""

from __future__ import annotations

import re
from functools import cache

from fedcontext.errors import require

KINDS = ("bar", "heatmap")  # the traces that the page draws, besides scatter, which is in Plotly's core
NAME = r"[\w$]+"
LIST = re.compile(rf"(?<=\.register\(\[)(?:{NAME}\(\),)+{NAME}\(\)(?=\]\))")


@cache
def script() -> str:
    """Return Plotly's script as the page holds it."""
    return eager(fewer(require("plotly.offline", extra="report").get_plotlyjs()))


def fewer(text: str, kinds: tuple[str, ...] = KINDS) -> str:
    """Return Plotly without the traces of other kinds in its list: what is not listed is never set up.

    Setting up the maps and the 3D scenes takes most of the time that Plotly needs to start.

    >>> bundle = 'var {0}=W((x,{0}x)=>{{{0}x.exports={{calc:c(),moduleType:"trace",name:"{1}"}}}});var {0}s=W((x,y)=>{{y.exports={0}()}});'
    >>> text = bundle.format("b", "bar") + bundle.format("m", "map")
    >>> fewer(text + "p.register([bs(),ms()]);", ("bar",)) == text + "p.register([bs()]);"
    True
    >>> fewer(text + "p.register([bs(),ms()]);", ("bar", "pie")) == text + "p.register([bs(),ms()]);"
    True
    """
    lists = LIST.findall(text)
    kept = [_listed_as(kind, text) for kind in kinds]
    if len(lists) != 1 or not set(kept) <= set(lists[0].split(",")):
        return text
    return LIST.sub(lambda _: ",".join(kept), text)


def _listed_as(kind: str, text: str) -> str:
    """Return the call that gives this kind of trace in Plotly's list, empty where there is none."""
    body = rf'\(\({NAME},{NAME}\)=>\{{(?:"use strict";)?{NAME}\.exports='
    module = re.search(rf'var ({NAME})={NAME}{body}\{{[^{{}}]*moduleType:"trace",name:"{kind}"', text)
    entry = module and re.search(rf"var ({NAME})={NAME}{body}{re.escape(module[1])}\(\)\}}\)", text)
    return f"{entry[1]}()" if entry else ""


def eager(text: str) -> str:
    """Return Plotly with its one large function in parentheses.

    Browsers take these for a sign that it is called at once, and compile it when they read it, which they do beside the
    page. Without them they only skim it then, and compile it later in the page's own time.

    >>> eager("(function(root, make) {} (self ? self : this, () => {}));")
    '(function(root, make) {} (self ? self : this, (() => {})));'
    >>> eager("var Plotly = {};")
    'var Plotly = {};'
    """
    return re.sub(r"(\? self : this, )(\(\) => \{.*\})(\)\);\s*)\Z", r"\1(\2)\3", text, count=1, flags=re.DOTALL)
