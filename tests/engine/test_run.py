"""The promise that holds the rest together: how the work is cut never changes the result, not by one bit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dpipe.config import Config
from dpipe.engine.metrics import read_rows
