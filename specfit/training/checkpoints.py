"""Heads on disk, and the state that training resumes from, bit for bit."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specfit.draft_vocab import DraftVocab
from specfit.files import write_json
from specfit.speculators.eagle3 import Eagle3, Eagle3Config

STATE = "state.json"  # written last


def save_head(folder: Path, head: Eagle3, vocab: DraftVocab) -> None:
    """Writes model.safetensors (bf16, with d2t and t2d) and config.json."""
    tensors = {name: p.detach().cpu().bfloat16() for name, p in head.state_dict().items()}
    tensors |= {"d2t": vocab.d2t.cpu(), "t2d": vocab.t2d.cpu()}
    partial = folder / "model.tmp"
    save_file({name: t.contiguous() for name, t in tensors.items()}, partial)
    partial.replace(folder / "model.safetensors")
    write_json(folder / "config.json", head.config.to_json())


def load_head(config: Path, weights: Path, device: torch.device) -> tuple[Eagle3, DraftVocab]:
    """A head as `save_head` wrote it, in fp32."""
    head = Eagle3(Eagle3Config.from_json(json.loads(config.read_text())))
    tensors = load_file(weights)
    vocab = DraftVocab(tensors.pop("d2t"), tensors.pop("t2d"))
    head.load_state_dict({name: t.float() for name, t in tensors.items()})
    return head.to(device).eval(), vocab


@torch.no_grad()
def rounded(head: Eagle3) -> Eagle3:
    """A copy with the numbers that `save_head` keeps: what is measured is what is served."""
    copy = Eagle3(head.config).to(head.fc.weight.device)
    state = {name: p.bfloat16().float() for name, p in head.state_dict().items()}
    copy.load_state_dict(state)
    return copy.eval()


@dataclass
class Progress:
    """How far training is."""

    step: int = 0  # optimizer steps done
    seconds: float = 0.0
    best: float = 0.0  # largest acceptance length measured so far
    best_step: int = 0


def save_state(
    folder: Path, head: Eagle3, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Replaces the state to resume from; a kill in between leaves the one before."""
    path = folder / f"resume-{progress.step:08}"
    path.mkdir(exist_ok=True)
    tensors = {f"head.{name}": p.detach() for name, p in head.named_parameters()}
    names = {id(p): name for name, p in head.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            tensors[f"optimizer.{key}.{names[id(parameter)]}"] = torch.as_tensor(value)
    save_file(
        {name: t.cpu().contiguous() for name, t in tensors.items()}, path / "state.safetensors"
    )
    write_json(path / STATE, vars(progress))
    for other in folder.glob("resume-*"):
        if other != path:
            shutil.rmtree(other)


def load_state(folder: Path, head: Eagle3, optimizer: torch.optim.Optimizer) -> Progress | None:
    """Fills `head` and `optimizer` from the newest whole state, if there is one."""
    whole = sorted(path.parent for path in folder.glob(f"resume-*/{STATE}"))
    if not whole:
        return None
    tensors = load_file(whole[-1] / "state.safetensors")
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(tensors[f"head.{name}"])
            state: dict[str, Any] = {
                key.split(".")[1]: value
                for key, value in tensors.items()
                if key.startswith("optimizer.") and key.split(".", 2)[2] == name
            }
            if state:
                optimizer.state[parameter] = {
                    key: value.to(parameter.device) for key, value in state.items()
                }
    return Progress(**json.loads((whole[-1] / STATE).read_text()))


def drop_states(folder: Path) -> None:
    """Removes what is no longer needed once training is over."""
    for path in folder.glob("resume-*"):
        shutil.rmtree(path)
