"""Writes netem/profiles/{worldwide,regional,two-sites}.toml: run it again after a change here.

Between regions: delay and bandwidth as published with DT-FM (NeurIPS 2022),
scripts/published/aws_region_links.csv. Within a region: 10 ms and 2 Gbit/s, as that work assumes.
Node i is the i-th of the list, so that neighbours in the pipeline are near each other where they
can be.
"""

import csv
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WITHIN_A_REGION = (10.0, 2.0)  # delay_ms, bandwidth_gbps
WORLD = (
    "Oregon Ohio Virginia Virginia Ireland London Frankfurt Frankfurt Singapore Sydney Tokyo Seoul"
)
SITES: dict[str, list[str]] = {
    "worldwide": WORLD.split(),
    "regional": ["Oregon"] * 4 + ["Ohio"] * 4 + ["Virginia"] * 4,
    "two-sites": ["Oregon"] * 6 + ["Virginia"] * 6,
}


def published() -> dict[frozenset[str], tuple[float, float]]:
    with (ROOT / "scripts/published/aws_region_links.csv").open(encoding="utf-8") as rows:
        return {
            frozenset((row["region_a"], row["region_b"])): (
                float(row["delay_ms"]),
                float(row["bandwidth_gbps"]),
            )
            for row in csv.DictReader(rows)
        }


def profile(name: str, nodes: list[str]) -> str:
    between = published()
    lines = [
        f'name = "{name}"',
        "# Made by scripts/aws_profiles.py from scripts/published/aws_region_links.csv (published "
        "with DT-FM, NeurIPS",
        "# 2022); within a region 10 ms and 2 Gbit/s, as that work assumes. One way, both "
        "directions, every pair of:",
        *(f"#   {node:2} {region}" for node, region in enumerate(nodes)),
        "link = [",
    ]
    for (a, region_a), (b, region_b) in combinations(enumerate(nodes), 2):
        delay_ms, gbps = (
            WITHIN_A_REGION if region_a == region_b else between[frozenset((region_a, region_b))]
        )
        shape = f"delay_ms = {delay_ms:g}, bandwidth_gbps = {gbps:g}"
        lines.append(f"    {{ from = {a}, to = {b}, {shape} }},  # {region_a} - {region_b}")
    return "\n".join([*lines, "]", ""])


if __name__ == "__main__":
    for name, nodes in SITES.items():
        (ROOT / f"netem/profiles/{name}.toml").write_text(profile(name, nodes), encoding="utf-8")
