"""The requests between HTTP and the loop: whatever happens first, each ends once."""

import asyncio
import itertools
import threading
from time import perf_counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specfit_serve.arrivals import Request, Revocable
from specfit_serve.emitted import Emitted
from specfit_serve.server.choices import Choice
from specfit_serve.server.errors import ApiError
from specfit_serve.server.live import LiveRequests
from specfit_serve.server.metrics import Metrics
from specfit_serve.stats import Round


def live(capacity=8):
    return LiveRequests(Metrics("m", 4), capacity=capacity)


def choice(id, *, stops=()):
    return Choice(
        idx=0,
        request=Request(id, [65], 0.0, arrived_at=perf_counter()),
        parts=asyncio.Queue(),
        decode=lambda tokens: bytes(tokens).decode(errors="replace"),
        stops=list(stops),
    )


def emitted(id, text, finish_reason=None, round_=None):
    return Emitted(id, list(text.encode()), round_, None, finish_reason)


def counts(requests):
    families = text_string_to_metric_families(requests.metrics.text().decode())
    return {
        sample.labels["finished_reason"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "vllm:request_success_total"
    }


def ended(**reasons):
    return {"stop": 0, "length": 0, "abort": 0} | reasons


def test_they_are_revocable_arrivals():
    assert isinstance(live(), Revocable)


# What may happen to one answer: the loop's steps, in their order, with a client's anywhere between.
LOOP = ["take", "first", "round", "end"]
ORDERS = [
    order
    for order in sorted(set(itertools.permutations([*LOOP, "leave", "leave", "look"])))
    if [step for step in order if step in LOOP] == LOOP
]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_answer_ends_once_whatever_happens_first(order):
    requests = live()
    requests.submit([choice("a")])
    in_loop = True
    for step in order:
        match step:
            case "take":
                in_loop = bool(requests.take())
            case "first" if in_loop:
                requests.emitted([emitted("a", "x")])
            case "round" if in_loop:
                requests.emitted([emitted("a", "yz", None, Round(1, 3, 1))])
            case "end" if in_loop:
                requests.emitted([emitted("a", "w", "length", Round(3, 3, 0))])
                in_loop = False
            case "leave":
                requests.give_up(["a"])
            case "look" if in_loop and order.index("look") > order.index("take"):
                in_loop = not requests.is_revoked("a")
    assert len(requests) == 0
    assert not requests.is_revoked("a")
    left_first = "leave" in order[: order.index("end")]
    assert counts(requests) == (ended(abort=1) if left_first else ended(length=1))


def test_a_stop_string_ends_the_answer_and_the_loop_is_told():
    requests = live()
    requests.submit([choice("a", stops=["STOP"])])
    requests.take()
    requests.emitted([emitted("a", "x")])
    requests.emitted([emitted("a", "STOPPED", None, Round(1, 6, 6))])
    assert counts(requests) == ended(stop=1)
    requests.give_up(["a"])
    assert requests.is_revoked("a")
    assert (len(requests), counts(requests)) == (0, ended(stop=1))


def test_who_has_left_takes_no_room():
    requests = live(capacity=2)
    requests.submit([choice("a"), choice("b")])
    requests.take()
    with pytest.raises(ApiError, match="2 of 2 answers are in flight or waited for, 1 more"):
        requests.submit([choice("c")])
    requests.give_up(["a"])
    requests.submit([choice("c")])
    requests.give_up(["c"])  # that the loop has not seen
    requests.submit([choice("d")])
    assert [r.id for r in requests.take()] == ["d"]


def test_all_of_a_request_are_taken_in_or_none():
    requests = live(capacity=3)
    requests.submit([choice("a"), choice("b")])
    with pytest.raises(ApiError):
        requests.submit([choice("c"), choice("d")])
    assert len(requests) == 2


def test_waiting_ends_with_a_request_or_for_good():
    requests, found = live(), []
    waiting = threading.Thread(target=lambda: found.append(requests.wait()))
    waiting.start()
    requests.submit([choice("a")])
    waiting.join(10)
    requests.take()
    waiting = threading.Thread(target=lambda: found.append(requests.wait()))
    waiting.start()
    requests.stop()
    waiting.join(10)
    assert found == [True, False]
    with pytest.raises(ApiError, match="shutting down") as caught:
        requests.submit([choice("b")])
    assert caught.value.status == 503
