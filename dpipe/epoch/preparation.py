"""What a machine does with a job before it offers itself: whatever is wrong is found while nobody
waits for it, and what the first epoch would read, write and import is there.

    ask for the job ──▶ build, draft ──▶ enlist ──▶ spare, or a rank
                             └──▶ refused, with words; the run has not heard of it
"""

from typing import Any

from dpipe.config.elastic import check_elastic
from dpipe.config.load import Config, build
from dpipe.config.run import NodeConfig
from dpipe.config.trust import refuse_untrusted
from dpipe.plan.forecast import without_search
from dpipe.plan.run_plan import draft
from dpipe.probe.launcher_costs import from_text


def prepare(
    job: dict[str, dict[str, Any]], layer_costs: str, node: NodeConfig, *, trust_code: bool
) -> Config:
    """`job` and its costs as an `Assignment` has them. Returns its configuration here. Raises
    `InputError` where this machine could not take a rank of it.
    """
    config = build({**job, "node": node.model_dump()})
    refuse_untrusted(config.model.layers, trust_code=trust_code)
    check_elastic(config)
    costs = from_text(config.digest(), layer_costs)
    # Reads the text, which makes its cache here, and imports what a rank needs.
    draft(config, probed=costs, choose=without_search, predicts_memory=False)
    return config
