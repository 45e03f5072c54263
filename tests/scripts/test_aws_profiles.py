from pathlib import Path

import pytest

from dpipe.network.link import Link
from dpipe.network.profile import load_network

PROFILES = Path(__file__).resolve().parents[2] / "netem/profiles"


@pytest.mark.parametrize("name", ["worldwide", "regional", "two-sites"])
def test_committed_profile_is_what_the_script_makes(script, name):
    module = script("aws_profiles")
    assert (PROFILES / f"{name}.toml").read_text() == module.profile(name, module.SITES[name])


def test_profile_has_the_published_links_and_the_assumed_ones_within_a_region():
    network = load_network(PROFILES / "two-sites.toml")
    network.check(12)
    assert (network.link(0, 1), network.link(5, 6)) == (Link(10, 2), Link(67, 0.79))


@pytest.mark.parametrize(("delay_ms", "gbps"), [(0.1, 10), (1, 5), (5, 2), (10, 1), (50, 1)])
def test_published_setting_is_named_by_its_figures(delay_ms, gbps):
    network = load_network(PROFILES / f"{delay_ms:g}ms-{gbps}gbps.toml")
    assert network.link(0, 1) == Link(delay_ms, gbps, window_bytes=9_700_000)
    assert network.name == f"{delay_ms:g}ms-{gbps}gbps"
