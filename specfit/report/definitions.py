"""The words of the report, a sentence each."""

from specfit.report.document import Definitions, Section
from specfit.report.figures import Number


def definitions(confidence: Number | None) -> Section:
    """Every term that a table's heading uses."""
    level = "the stated level" if confidence is None else f"{100 * confidence:g} %"
    return Section(
        "Definitions",
        [
            Definitions(
                {
                    "round": "One draft by the proposer and one verification by the target.",
                    "proposer": "What drafts: a fitted head by its name; ngram, which copies what "
                    "followed the same tokens earlier in the context; or none, plain decoding.",
                    "k": "The number of tokens drafted in a round.",
                    "own token": "The one token that the target itself adds in each round, "
                    "whatever is kept of the draft.",
                    "acceptance length": "Mean tokens emitted per round, the own token included, "
                    "pooled over all rounds: from 1 to k + 1.",
                    "survival": "Share of the rounds in which the draft is kept up to and "
                    "including a position; acceptance length is 1 plus their sum.",
                    "conditional acceptance": "Share of the rounds that keep a position among "
                    "those that kept the one before it.",
                    "coverage": "Share of the answer tokens that are in the draft vocabulary, and "
                    "so can be drafted at all.",
                    "tokens/s": "Tokens emitted per second by a request decoded alone, its prefill "
                    "left out, on the machine named above; the interval is the range over the "
                    "prompts timed.",
                    "speed-up": "Tokens/s over those of plain decoding on the same traffic; its "
                    "interval runs between opposite ends of the two and is wider than theirs.",
                    "draft time": "Share of the decoding time that the proposer takes.",
                    "interval": f"The range that holds the figure at {level}, from resampling "
                    "whole prompts; two figures are told apart where their intervals do not meet.",
                    "equal to plain": "Whether greedy answers are plain decoding's, token for "
                    "token; sampled ones share its distribution and are not compared.",
                    "margin": "Where an answer parts from plain decoding's, how far the logit of "
                    "plain's token lies above that of the other.",
                    "looped": "Answers that repeat themselves without end: what they repeat "
                    "inflates acceptance, so it is left out of every figure.",
                }
            )
        ],
    )
