"""What the API pages change about docstrings: `Example:` is a section of examples, and `::` is a colon."""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Rewrites each docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
