"""Refusal of a Python that is too old.

Everything else is in pyproject.toml; its requires-python comes too late for pip before version 24.1, which asks for it
only after it has downloaded half a gigabyte of packages.
"""

import sys

from setuptools import setup

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("specdec needs Python 3.11 to 3.14, {} is {}.{}".format(sys.executable, *sys.version_info))

setup()
