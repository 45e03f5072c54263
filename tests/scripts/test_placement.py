"""The published placement problem: its cost, and the search compared with all placements."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from dpipe.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import aws_profiles  # noqa: E402 - scripts are not a package
import dtfm  # noqa: E402
import placement  # noqa: E402
import placement_cases  # noqa: E402

Groups = tuple[tuple[int, ...], ...]


def random_problem(
    seed: int, stages: int, replicas: int, *, symmetric: bool = True
) -> dtfm.Problem:
    rng = np.random.default_rng(seed)
    machines = stages * replicas
    delay_ms = rng.uniform(1, 250, (machines, machines))
    bandwidth_gbps = rng.uniform(0.3, 2, (machines, machines))
    if symmetric:
        delay_ms = np.triu(delay_ms) + np.triu(delay_ms, 1).T
        bandwidth_gbps = np.triu(bandwidth_gbps) + np.triu(bandwidth_gbps, 1).T
    return dtfm.Problem(delay_ms, bandwidth_gbps, stages, replicas, 0.65, 0.47)


def region_problem(regions: Sequence[str]) -> dtfm.Problem:
    between = aws_profiles.published()
    machines = len(regions)
    delay_ms = np.zeros((machines, machines))
    bandwidth_gbps = np.zeros((machines, machines))
    for here, there in permutations(range(machines), 2):
        link = aws_profiles.WITHIN_A_REGION
        if regions[here] != regions[there]:
            link = between[frozenset((regions[here], regions[there]))]
        delay_ms[here, there], bandwidth_gbps[here, there] = link
    return dtfm.Problem(delay_ms, bandwidth_gbps, 8, 8, 0.65, 0.47)


def written_out_s(problem: dtfm.Problem, groups: Sequence[Sequence[int]]) -> float:
    """The published cost, computed by trying every matching and every path."""
    delay_s = problem.delay_ms / 1000
    gigabits = 8 / problem.bandwidth_gbps

    def member_s(member: int, group: Sequence[int]) -> float:
        return sum(
            2 * (delay_s[member, j] + problem.gradient_gb * gigabits[member, j] / len(group))
            for j in group
            if j != member
        )

    def hop_s(senders: Sequence[int], receivers: Sequence[int]) -> float:
        return min(
            max(
                delay_s[i, j] + problem.activation_gb * gigabits[i, j]
                for i, j in zip(senders, order, strict=True)
            )
            for order in permutations(receivers)
        )

    exchange_s = max(member_s(member, group) for group in groups for member in group)
    path_s = min(
        sum(hop_s(groups[a], groups[b]) for a, b in pairwise(order))
        for order in permutations(range(len(groups)))
    )
    return exchange_s + 2 * path_s


def all_groupings(machines: tuple[int, ...], size: int) -> Iterator[Groups]:
    if not machines:
        yield ()
        return
    first, *others = machines
    for mates in combinations(others, size - 1):
        left = tuple(machine for machine in others if machine not in mates)
        for groups in all_groupings(left, size):
            yield ((first, *mates), *groups)


@pytest.mark.parametrize("symmetric", [True, False])
def test_cost_is_what_the_paper_writes_out(symmetric: bool) -> None:
    problem = random_problem(3, 3, 3, symmetric=symmetric)
    groups = [(0, 4, 8), (1, 2, 7), (3, 5, 6)]

    assert dtfm.cost_s(problem, groups) == pytest.approx(written_out_s(problem, groups), rel=1e-12)


@pytest.mark.parametrize(("stages", "replicas"), [(4, 2), (2, 4), (2, 3), (8, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_search_finds_the_optimum_of_small_cases(stages: int, replicas: int, seed: int) -> None:
    problem = random_problem(seed, stages, replicas)
    machines = tuple(range(stages * replicas))

    optimum_s = min(dtfm.cost_s(problem, groups) for groups in all_groupings(machines, replicas))

    assert dtfm.search(problem, seconds=0.4).cost_s == pytest.approx(optimum_s, rel=1e-12)


def test_annealing_finds_the_optimum_too(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(2, 3, 3)
    links = dtfm._Links(problem)
    optimum_s = min(links.placement(groups).cost_s for groups in all_groupings(tuple(range(9)), 3))
    monkeypatch.setattr(dtfm, "_MOST_GROUPINGS", 0)  # otherwise such a small case is not annealed

    assert dtfm.search(problem, seconds=1).cost_s == pytest.approx(optimum_s, rel=1e-12)


@pytest.mark.parametrize(("stages", "replicas"), [(1, 6), (6, 1), (4, 3)])
def test_placement_uses_each_machine_once_and_costs_what_it_says(
    stages: int, replicas: int
) -> None:
    problem = random_problem(7, stages, replicas, symmetric=False)

    best = dtfm.search(problem, seconds=0.2)

    machines = sorted(machine for stage in best.stages for machine in stage)
    assert machines == list(range(stages * replicas))
    assert {len(stage) for stage in best.stages} == {replicas}
    assert best.cost_s == pytest.approx(dtfm.cost_s(problem, best.stages), rel=1e-12)


def test_members_of_a_replica_are_matched_from_stage_to_stage() -> None:
    problem = random_problem(5, 4, 4)

    best = dtfm.search(problem, seconds=0.2)

    hops_s = 0.0
    for senders, receivers in pairwise(best.stages):
        hops_s += max(
            problem.delay_ms[i, j] / 1000 + problem.activation_gb * 8 / problem.bandwidth_gbps[i, j]
            for i, j in zip(senders, receivers, strict=True)
        )
    exchange_s = best.cost_s - 2 * hops_s
    assert exchange_s == pytest.approx(
        max(_exchange_s(problem, stage) for stage in best.stages), rel=1e-9
    )


def _exchange_s(problem: dtfm.Problem, group: Sequence[int]) -> float:
    index = np.ix_(group, group)
    alone = dtfm.Problem(
        problem.delay_ms[index], problem.bandwidth_gbps[index], 1, len(group), 0.65, 0.47
    )
    return dtfm.cost_s(alone, [tuple(range(len(group)))])


def test_search_beats_near_and_random_groups_over_the_world() -> None:
    regions = ["Oregon", "Virginia", "Ohio", "Tokyo", "Seoul", "London", "Frankfurt", "Ireland"]
    problem = region_problem([region for region in regions for _ in range(8)])
    shuffled = np.random.default_rng(0).permutation(64).reshape(8, 8).tolist()
    by_region = np.arange(64).reshape(8, 8).tolist()
    links = dtfm._Links(problem)

    best = dtfm.search(problem, seconds=1)

    assert best.cost_s < 0.85 * links.placement(by_region).cost_s
    assert best.cost_s < 0.6 * links.placement(shuffled).cost_s


@pytest.mark.parametrize(
    ("delay_ms", "bandwidth_gbps", "words"),
    [
        (np.ones((4, 3)), np.ones((4, 3)), "must be square, it is 4 x 3"),
        (np.ones(4), np.ones(4), "must be square, it is 4"),
        (np.ones((4, 4)), np.ones((3, 3)), "4 x 4 delays, but 3 x 3 bandwidths"),
        (-np.ones((4, 4)), np.ones((4, 4)), "0 or more"),
        (np.full((4, 4), np.nan), np.ones((4, 4)), "0 or more"),
        (np.ones((4, 4)), np.zeros((4, 4)), "above 0"),
        (np.ones((5, 5)), np.ones((5, 5)), "take 4 machines, but the matrices are of 5"),
    ],
)
def test_matrices_that_are_no_network_are_refused(
    delay_ms: np.ndarray, bandwidth_gbps: np.ndarray, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        dtfm.Problem(delay_ms, bandwidth_gbps, 2, 2, 0.65, 0.47)


def test_diagonals_are_not_read() -> None:
    bandwidth_gbps = np.ones((4, 4)) - np.eye(4)
    delay_ms = np.ones((4, 4))
    np.fill_diagonal(delay_ms, math.nan)

    problem = dtfm.Problem(delay_ms, bandwidth_gbps, 2, 2, 0.65, 0.47)

    assert math.isfinite(dtfm.search(problem, seconds=0.1).cost_s)


def test_command_prints_the_placement_as_json(tmp_path: Path) -> None:
    problem = random_problem(1, 2, 3)
    np.savetxt(tmp_path / "d.csv", problem.delay_ms, delimiter=",")
    np.savetxt(tmp_path / "b.csv", problem.bandwidth_gbps, delimiter=",")

    ended = CliRunner().invoke(placement.main, _arguments(tmp_path, "--json"))

    printed = json.loads(ended.output)
    assert ended.exit_code == 0
    assert sorted(machine for stage in printed["stages"] for machine in stage) == list(range(6))
    assert printed["cost"] == pytest.approx(dtfm.cost_s(problem, printed["stages"]), rel=1e-9)


@pytest.mark.parametrize("text", ["1,2\n3\n", "a,b\nc,d\n", ""])
def test_file_that_is_no_matrix_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "d.csv").write_text(text, encoding="utf-8")
    (tmp_path / "b.csv").write_text("1,1\n1,1\n", encoding="utf-8")

    ended = CliRunner().invoke(placement.main, _arguments(tmp_path))

    assert ended.exit_code == 2
    assert "error: " in ended.output


def _arguments(folder: Path, *more: str) -> list[str]:
    files = ["--delay", str(folder / "d.csv"), "--bandwidth", str(folder / "b.csv")]
    sizes = ["--stages", "2", "--replicas", "3", "--gradient-gb", "0.65", "--activation-gb", "0.47"]
    return [*files, *sizes, "--seconds", "0.3", *more]


def test_command_without_matrices_names_what_it_takes() -> None:
    ended = CliRunner().invoke(placement.main, ["--stages", "2"])

    assert ended.exit_code == 2
    assert "--delay, --bandwidth, --stages, --replicas" in " ".join(ended.output.split())


@pytest.mark.slow
def test_command_prints_a_line_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    small = placement_cases.Case("small", 2, 2, num_blocks=2)
    monkeypatch.setattr(placement_cases, "CASES", (small,))

    ended = CliRunner().invoke(placement.main, ["--objective", "step", "--seconds", "0.1"])

    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.output)["case"] == "small"
