"""Which component a request belongs to, from its first user message.

Features are hashed n-grams (3 to 5 bytes, and words), the length and whether there are tools. The
model is multinomial logistic regression, every component weighted alike, so that its mistakes do
not depend on how common components are in the public texts; what they are is measured on texts
that were held out.
"""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specfit.checks import require

NUM_BINS = 4096  # of n-grams
NUM_LENGTHS = 20  # powers of two of a length in characters
NUM_FEATURES = NUM_BINS + NUM_LENGTHS + 2  # the last two: whether there are tools, and a constant
MAX_BYTES = 4000  # of a text that are read: what follows is of the same kind
GRAM_BYTES = (3, 4, 5)
MULTIPLIER = np.uint64(
    0x9E3779B97F4A7C15
)  # odd, from the golden ratio: Knuth's multiplicative hash
NUM_FOLDS = 5  # of the held-out confusion
LEAST_TEXTS = 2 * NUM_FOLDS  # of a component
MOST_TEXTS = 400  # of a component, drawn by seed: more takes longer and is no better
PENALTY = 3e-5  # half of it times the squares of the weights is added to the loss
NUM_ITERATIONS = 30  # of L-BFGS
WORD = re.compile(r"\w+")


@dataclass(frozen=True, eq=False)
class Classifier:
    """A trained classifier and its measured mistakes."""

    components: list[str]
    weights: Float[Tensor, "features components"]
    confusion: Float[ndarray, "true predicted"]  # P(predicted | true), held out; rows sum to 1
    num_texts: list[int]  # by component, of which `confusion` is measured

    def component(self, text: str, has_tools: bool) -> str:
        """The most likely component of a request."""
        scores = features([(text, has_tools)]) @ self.weights
        return self.components[int(scores.argmax())]

    def save(self, path: Path) -> None:
        """Writes a safetensors file, which `load` reads."""
        described = {"components": json.dumps(self.components)}
        tensors = {
            "weights": self.weights,
            "confusion": torch.from_numpy(self.confusion),
            "num_texts": torch.tensor(self.num_texts),
        }
        save_file(tensors, path, metadata=described)


def load(path: Path) -> Classifier:
    """A classifier that was saved.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is of a version with other features.
    """
    if not path.is_file():
        raise FileNotFoundError(f"a classifier must be a file, no {path}")
    with safe_open(path, "pt") as file:
        components = json.loads(file.metadata()["components"])
        weights, confusion, num_texts = (
            file.get_tensor(name) for name in ("weights", "confusion", "num_texts")
        )
    require(len(weights) == NUM_FEATURES, f"{path}", f"have {NUM_FEATURES} features", len(weights))
    return Classifier(components, weights, confusion.numpy(), num_texts.tolist())


def train(
    texts_by_component: Mapping[str, Sequence[tuple[str, bool]]], seed: int = 0
) -> Classifier:
    """Trains on (text, has_tools) of public requests, and measures the confusion.

    `confusion` is of five models, each of which is shown a fifth of the texts that it was not
    trained on; the model that is returned was trained on all of them. Texts that occur twice are
    used once. The same texts and seed give the same classifier. Held-out texts are of the same
    sources: on traffic that is unlike them there are more mistakes than `confusion` says.

    Raises:
        ValueError: there are less than two components, or a component has too few texts.
    """
    components = list(texts_by_component)
    require(len(components) >= 2, "a classifier's components", "be two or more", components)
    generator = np.random.default_rng(seed)
    examples: list[tuple[str, bool]] = []
    labels: list[int] = []
    folds: list[int] = []
    for i, name in enumerate(components):
        own = list(dict.fromkeys(texts_by_component[name]))
        own = [own[j] for j in generator.permutation(len(own))[:MOST_TEXTS]]
        key = f"distinct texts of component {name}"
        require(len(own) >= LEAST_TEXTS, key, f"be at least {LEAST_TEXTS}", len(own))
        examples += own
        labels += [i] * len(own)
        folds += [j % NUM_FOLDS for j in range(len(own))]
    x, y, fold = features(examples), torch.tensor(labels), torch.tensor(folds)
    counts = torch.zeros(len(components), len(components), dtype=torch.float64)
    for held_out in range(NUM_FOLDS):
        trained = fold != held_out
        weights = _fitted(x[trained], y[trained], len(components))
        predicted = (x[~trained] @ weights).argmax(1)
        ones = torch.ones(len(predicted), dtype=torch.float64)
        counts.index_put_((y[~trained], predicted), ones, accumulate=True)
    return Classifier(
        components,
        _fitted(x, y, len(components)),
        (counts / counts.sum(1, keepdim=True)).numpy(),
        counts.sum(1).int().tolist(),
    )


def features(
    examples: Sequence[tuple[str, bool]],
) -> Float[Tensor, "examples features"]:
    """Of each (text, has_tools): square roots of how often a bin is hit, at norm 1, and flags."""
    rows = torch.zeros(len(examples), NUM_FEATURES)
    for row, (text, has_tools) in zip(rows, examples, strict=True):
        hits = np.bincount(_bins(text), minlength=NUM_BINS)
        grams = torch.from_numpy(np.sqrt(hits)).float()
        row[:NUM_BINS] = grams / max(1.0, float(grams.norm()))
        row[NUM_BINS + min(len(text).bit_length(), NUM_LENGTHS - 1)] = 1.0
        row[-2] = float(has_tools)
        row[-1] = 1.0
    return rows


def _bins(text: str) -> Int[ndarray, " grams"]:
    """A bin of each n-gram; the same on every machine, which Python's hash() is not."""
    said = text[:MAX_BYTES].lower().encode("utf-8", "replace")[:MAX_BYTES]
    codes = np.frombuffer(said, dtype=np.uint8).astype(np.uint64)
    hashes = []
    for n in GRAM_BYTES:
        # The bytes of a gram, one after the other, and n, so that grams of two lengths differ.
        grams = np.full(max(0, len(codes) - n + 1), n, dtype=np.uint64)
        for i in range(n):
            grams = (grams << np.uint64(8)) | codes[i : i + len(grams)]
        hashes.append(grams)
    words = WORD.findall(said.decode("utf-8", "replace"))
    hashes.append(np.array([zlib.crc32(w.encode()) for w in words], dtype=np.uint64))
    # The product wraps around; its upper bits depend on all the bits of the gram.
    shift = np.uint64(64 - (NUM_BINS.bit_length() - 1))
    bins: Int[ndarray, " grams"] = ((np.concatenate(hashes) * MULTIPLIER) >> shift).astype(np.int64)
    return bins


def _fitted(
    x: Float[Tensor, "examples features"], y: Int[Tensor, " examples"], num_components: int
) -> Float[Tensor, "features components"]:
    """Weights of least cross entropy, each component weighted alike, and a small penalty."""
    shares = 1 / torch.bincount(y, minlength=num_components).float()
    weights = torch.zeros(x.shape[1], num_components, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=NUM_ITERATIONS, history_size=10, line_search_fn="strong_wolfe"
    )

    def loss() -> float:
        optimizer.zero_grad()
        nll = torch.nn.functional.cross_entropy(x @ weights, y, weight=shares)
        total = nll + PENALTY / 2 * weights.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return float(total.detach())

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach()
