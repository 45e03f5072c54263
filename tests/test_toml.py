"""Values that are written as TOML are read back unchanged."""

import tomllib
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpipe.toml import to_toml

# TOML holds Unicode, but no half of a surrogate pair
STRINGS = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.one_of(
    STRINGS, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner), st.dictionaries(STRINGS, inner))
)


@given(VALUES)
def test_value_is_read_as_it_was_written(value: object) -> None:
    assert tomllib.loads(f"v = {to_toml(value)}")["v"] == value


@pytest.mark.parametrize("value", [None, date(2026, 1, 1)])
def test_value_that_is_not_written_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="TOML has no"):
        to_toml(value)
