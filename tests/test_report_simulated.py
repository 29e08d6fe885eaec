"""The part of the page on the simulated server says what the rows say."""

import pytest

from specfit.report import simulated
from specfit.report.document import Image, Table

RATES = [0.5, 2.0, 8.0]


def row(component, rate, k, *, best, **more):
    values = {
        "kind": "simulated",
        "component": component,
        "sessions_per_second": rate,
        "num_draft_tokens": k,
        "is_best_k": best,
        "num_requests": 1234 if component == "chat" else 321,
        "goodput_share": 0.75,
        "goodput_share_low": 0.7,
        "goodput_share_high": 0.8,
        "goodput_requests_per_second": 1.25 * rate,
        "prefix_hit_rate": 0.3,
        "ttft_ms_mean": 100.0,
        "ttft_ms_p50": 80.0,
        "ttft_ms_p99": 900.4,
        "itl_ms_mean": 12.34,
        "itl_ms_p99": 45.6,
        "latency_ms_mean": 2000.0 / (k + 1),
        "latency_ms_p50": 1500.0,
    }
    if component == "all":
        values |= {"utilization": 0.5, "mean_batch": 3.21}
    return values | more


def rows(**more):
    best = {0.5: 3, 2.0: 2, 8.0: 0}
    return [
        row(component, rate, k, best=k == best[rate], **more)
        for rate in RATES
        for k in range(4)
        for component in ("all", "chat", "edit")
    ]


def blocks(folder, **more):
    image, best, parts = simulated.blocks(folder, [{"kind": "latency"}, *rows(**more)])
    assert isinstance(image, Image)
    assert isinstance(best, Table)
    assert isinstance(parts, Table)
    return image, best, parts


def test_rows_of_other_kinds_make_no_part_of_the_page(tmp_path):
    assert simulated.blocks(tmp_path, [{"kind": "latency"}, {"kind": "best"}]) == []
    assert list(tmp_path.iterdir()) == []


def test_each_rate_has_one_row_with_its_best_k(tmp_path):
    _, best, _ = blocks(tmp_path)
    assert [[str(cell) for cell in row[:2]] for row in best.rows] == [
        ["0.500", "3"],
        ["2.000", "2"],
        ["8.000", "0"],
    ]


def test_promises_are_in_percent_with_their_interval(tmp_path):
    _, best, _ = blocks(tmp_path)
    assert [str(cell) for cell in best.rows[0][2:]] == [
        "75.0 (70.0\N{EN DASH}80.0)",
        "0.62",
        "100",
        "900",
        "12.3",
        "45.6",
        "50.0 %",
        "3.2",
        "30.0 %",
    ]


def test_components_are_at_the_middle_rate_with_its_best_k(tmp_path):
    _, _, parts = blocks(tmp_path)
    assert "at 2.000 sessions/s" in parts.caption
    assert [[str(cell) for cell in row] for row in parts.rows] == [
        ["chat", "1,234", "75.0 %", "80", "900", "12.3", "1,500", "30.0 %"],
        ["edit", "321", "75.0 %", "80", "900", "12.3", "1,500", "30.0 %"],
    ]


@pytest.mark.parametrize("missing", ["itl_ms_mean", "itl_ms_p99"])
def test_answers_of_one_token_have_nothing_between_tokens(tmp_path, missing):
    without = [{k: v for k, v in row.items() if k != missing} for row in rows()]
    _, best, parts = simulated.blocks(tmp_path, without)
    cells = [str(cell) for row in [*best.rows, *parts.rows] for cell in row]
    assert "not measured" in cells


def test_few_requests_have_no_interval_and_say_so(tmp_path):
    bare = [{k: v for k, v in row.items() if not k.endswith(("_low", "_high"))} for row in rows()]
    _, best, _ = simulated.blocks(tmp_path, bare)
    assert str(best.rows[0][2]) == "75.0 (no interval)"


def test_the_plot_is_beside_the_page_and_named_in_it(tmp_path):
    image, _, _ = blocks(tmp_path)
    assert image.name == "goodput.png"
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")
