"""`drift`: how far the traffic has moved, and whether the draft model still fits it."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specfit.files import write_json
from specfit.report import drift as page
from specfit.traffic.config import ProfileConfig
from specfit.traffic.drift import drift
from specfit.traffic.fingerprint_config import DriftConfig

VERSION = 1
log = logging.getLogger(__name__)


def run(
    folder: Path,
    *,
    config: DriftConfig,
    old: ProfileConfig,
    new: ProfileConfig,
    acceptance: Sequence[Mapping[str, Any]] | None,
) -> None:
    """Writes drift.json, and a page with its plot and tables.

    Args:
        folder: of the artifact.
        config: the thresholds.
        old: what `config.old` names.
        new: what `config.new` names.
        acceptance: the rows of acceptance.json; None if nothing was measured.

    Raises:
        ValueError: the rows have none of the proposer, or of the old traffic.
    """
    found = drift(old, new, acceptance, config)
    write_json(folder / "drift.json", found)
    page.write_page(folder)
    log.info("drift: %s. %s", found["verdict"], found["reason"])
