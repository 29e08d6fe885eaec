"""Counters by the names that vLLM has for them, so that its dashboards and scripts read them."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specfit_serve.stats import Round

# vLLM's.
_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
FINISHED = ("stop", "length", "abort")


class Metrics:
    """What was served since the start. All methods may be called from any thread."""

    def __init__(self, model: str, num_draft_tokens: int) -> None:
        self._registry = CollectorRegistry()
        self._model = model

        def counter(name: str, help: str) -> Counter:
            found = Counter(f"vllm:{name}", help, ["model_name"], registry=self._registry)
            return found.labels(model)

        self._prompt = counter("prompt_tokens", "Tokens prefilled; a prompt once for each choice.")
        self._generated = counter("generation_tokens", "Tokens of answers.")
        self._drafts = counter("spec_decode_num_drafts", "Rounds that drafted anything.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens kept.")
        by_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Rounds that kept the drafted token at this position.",
            ["model_name", "position"],
            registry=self._registry,
        )
        self._by_position = [by_position.labels(model, str(i)) for i in range(num_draft_tokens)]
        finished = Counter(
            "vllm:request_success",
            "Answers that ended, by why.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._finished = {reason: finished.labels(model, reason) for reason in FINISHED}
        self._first = self._histogram(
            "time_to_first_token_seconds",
            "From a request to its first token.",
            _FIRST_TOKEN_BUCKETS,
        )
        self._between = self._histogram(
            "inter_token_latency_seconds",
            "Between passes that gave an answer tokens.",
            _BETWEEN_BUCKETS,
        )

    def watch(self, num_running: Callable[[], int], num_waiting: Callable[[], int]) -> None:
        """Asks for these whenever the metrics are read."""
        for name, help, function in (
            ("num_requests_running", "Answers in slots.", num_running),
            ("num_requests_waiting", "Requests that wait for a slot.", num_waiting),
        ):
            gauge = Gauge(f"vllm:{name}", help, ["model_name"], registry=self._registry)
            gauge.labels(self._model).set_function(function)

    def first_token(self, num_prompt_tokens: int, seconds: float) -> None:
        """A prompt was prefilled; `seconds` after it came there was a token."""
        self._prompt.inc(num_prompt_tokens)
        self._first.observe(seconds)

    def more_tokens(self, round_: Round, seconds: float) -> None:
        """A round added to an answer, `seconds` after the one before."""
        if round_.num_drafted:
            self._drafts.inc()
            self._drafted.inc(round_.num_drafted)
            self._accepted.inc(round_.num_kept)
            for i in range(round_.num_kept):
                self._by_position[i].inc()
        self._between.observe(seconds)

    def generated(self, num_tokens: int) -> None:
        """Tokens that an answer got."""
        self._generated.inc(num_tokens)

    def finished(self, reason: str) -> None:
        """An answer ended, for one of FINISHED."""
        self._finished[reason].inc()

    def text(self) -> bytes:
        """All of it, in Prometheus' format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        found = Histogram(
            f"vllm:{name}", help, ["model_name"], buckets=buckets, registry=self._registry
        )
        return found.labels(self._model)
