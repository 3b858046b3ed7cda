"""Lets long names in code break between their parts, and keeps options in one piece.

A browser breaks a name that is too long for a narrow screen after any letter, and an option after its hyphens. So names
get places where they may break (`<wbr>`, which is not copied), which the stylesheet uses on narrow screens only.
"""

from __future__ import annotations

import re

_APART = re.compile(r"(<pre\b.*?</pre>|<h[1-6]\b.*?</h[1-6]>|<table\b.*?</table>)", re.DOTALL)
_CODE = re.compile(r"<code>([^<]+)</code>")
_OPTION = re.compile(r"(?<!\S)--?[a-z][\w-]*")
_PARTS = re.compile(
    r"(?<=[A-Za-z0-9][/_.,:=(+])(?<![0-9]\.)(?!(?:md|py|json|yaml)\b)"  # after_a.sign, but not in 0.5 or before .md
    r"(?=[\"'{\[*]?[A-Za-z0-9]{2}|\.\.\.)"
    r"|(?<=[)\]])(?=\.[a-z])"  # after(a).call
    r"|(?<=[a-z])(?=[A-Z][a-z])"  # BetweenWords
)
_LONG, _LONG_IN_TABLE = 34, 9  # characters that fit a line, or a column, of a phone


def on_page_content(html: str, **_: object) -> str:
    """Mark where the code of a page may break. MkDocs calls this for every page after it is rendered."""
    parts = _APART.split(html)
    for index, part in enumerate(parts):
        if part.startswith("<table"):
            parts[index] = _CODE.sub(lambda code: _marked(code[1], _LONG_IN_TABLE), part)
        elif index % 2 == 0:
            parts[index] = _CODE.sub(lambda code: _marked(code[1], _LONG), part)
    return "".join(parts)


def _marked(code: str, fits: int) -> str:
    whole = _OPTION.sub(r'<span class="whole">\g<0></span>', code)
    words = re.split(r"(<[^>]*>|[\s-]+)", whole)
    broken = [_PARTS.sub("<wbr>", word) if len(word) > fits and word[0] != "<" else word for word in words]
    return f"<code>{''.join(broken)}</code>"
