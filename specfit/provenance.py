"""What it takes to make the same head again."""

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from specfit.artifacts import Artifact, Recipe
from specfit.config import RunConfig
from specfit.files import dumps
from specfit.targets.info import TargetInfo
from specfit.targets.locate import Location
from specfit.traffic.profile_files import to_json


def provenance(
    cfg: RunConfig,
    recipes: Mapping[str, Recipe],
    head: Artifact,
    location: Location,
    info: TargetInfo,
) -> dict[str, Any]:
    """Keys, versions, git, seed, command, target, profile and configuration, as JSON values."""
    return {
        "keys": {stage: recipe.key for stage, recipe in recipes.items()},
        "versions": head.manifest["packages"],
        "git": head.manifest["git_revision"],
        "seed": cfg.seed,
        "command": shlex.join(["specfit", *sys.argv[1:]]),
        "target": info.to_json() | {"identity": location.identity},
        "profile": to_json(cfg.profile),
        "config": json.loads(dumps(asdict(cfg))),  # enums by name
    }
