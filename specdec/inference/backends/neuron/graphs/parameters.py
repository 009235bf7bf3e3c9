"""Check of names in `--neuron_config` against the parameters of NxDI's NeuronConfig, found in NxDI's source.

NeuronConfig takes any keyword and only warns of unknown ones, so a misspelt one would have no effect.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Collection, Mapping
from typing import Any

from specdec.inference.errors import ConfigError

_READS = re.compile(r"""kwargs\.(?:pop|get)\(\s*["'](\w+)["']|["'](\w+)["'] in kwargs""")


def parameter_names(config_class: type) -> frozenset[str]:
    """Return the names that a NeuronConfig class reads from its keywords; empty if its source cannot be read."""
    try:
        source = "".join(inspect.getsource(base) for base in config_class.__mro__[:-1])
    except OSError:
        return frozenset()
    return frozenset(first or second for first, second in _READS.findall(source))


def check_names(overrides: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise ConfigError for the first name in `overrides` that is not among NeuronConfig's `names`.

    If `names` is empty, they could not be read, and NxDI itself warns of unknown ones.
    """
    for name in overrides:
        if names and name not in names:
            close = difflib.get_close_matches(name, sorted(names), n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            raise ConfigError(f"neuron_config: NeuronConfig has no parameter {name}{hint}")
