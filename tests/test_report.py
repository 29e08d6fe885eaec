import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from specfit.config import ReportConfig
from specfit.report import markdown, page, plots
from specfit.report.acceptance import Acceptance
from specfit.report.document import Column, Document, Table
from specfit.report.figures import estimate
from specfit.stages import report

K = 4
SURVIVAL = {"none": [], "ngram": [0.19, 0.11, 0.07, 0.05], "eagle3": [0.44, 0.19, 0.08, 0.03]}
SPEED = {"none": 18.2, "ngram": 19.6, "eagle3": 22.4}
KINDS = [("all", 0.0), ("chat", 0.0), ("code_edit", 0.0), ("all", 1.0), ("chat", 1.0)]
DIFFERENCE = {
    "component": "chat",
    "proposer": "eagle3",
    "id": "dolly-0193",
    "position": 41,
    "margin": 0.00173,
    "plain_token": " the",
    "token": " a\n",
}


def acceptance_row(component, temperature, proposer, k=K):
    edits = component == "code_edit" and proposer == "ngram"
    scale = (2.6 if edits else 1.0) * (0.8 if temperature else 1.0)
    survival = [round(scale * s, 4) for s in SURVIVAL[proposer][:k]]
    length = 1 + sum(survival)
    half = 0.0 if proposer == "none" else 0.04 * length
    speed = SPEED[proposer] * (1.4 if edits else 1.0)
    reached = [1.0, *survival]
    return {
        "component": component,
        "proposer": proposer,
        "temperature": temperature,
        "num_draft_tokens": 0 if proposer == "none" else k,
        "num_prompts": 64 if component == "all" else 32,
        "num_rounds": 2231,
        "num_tokens": round(2231 * length),
        "acceptance_length": length,
        "acceptance_length_low": length - half,
        "acceptance_length_high": length + half,
        "acceptance_length_per_request_mean": 1.04 * (length - 1) + 1,
        "acceptance_by_position": survival,
        "conditional_acceptance": [b / a for a, b in zip(reached, survival, strict=False)],
        "tokens_per_second": speed,
        "tokens_per_second_low": 0.98 * speed,
        "tokens_per_second_high": 1.02 * speed,
        "draft_time_share": 0.0 if proposer == "none" else 0.17,
        "outputs_equal_plain": None if temperature or proposer == "none" else True,
        "num_looped": 2,
        "first_20_acceptance_length": 0.93 * (length - 1) + 1,
        "by_context": [
            {
                "low": low,
                "high": low + 256,
                "acceptance_length": 1 + (1 + d) * (length - 1),
                "num_rounds": 700,
            }
            for low, d in ((0, 0.07), (256, 0.0), (512, -0.08))
        ],
    }


def acceptance_record(ks=(K,)):
    rows = [
        acceptance_row(component, temperature, proposer, k)
        for component, temperature in KINDS
        for proposer in SURVIVAL
        for k in (ks if proposer != "none" else (K,))
    ]
    return {
        "rows": rows,
        "differences": [],
        "confidence": 0.95,
        "device": "cpu",
        "num_threads": 2,
    }


def train_logs():
    log = [
        {
            "step": step,
            "epoch": step / 50,
            "tokens": 2048 * step,
            "loss": 1.1 + 4.6 * 0.985**step + 0.1 * (step % 3),
            "lr": 1e-3,
            "grad_norm": 0.8,
            "accuracy": [0.46 * (1 - 0.985**step) * 0.8**s for s in range(4)],
            "expected_acceptance_length": 1.4,
            "seconds": 1.3 * step,
        }
        for step in range(2, 402, 2)
    ]
    evals = [
        {
            "step": 50 * i,
            "epoch": i,
            "acceptance_length": 1.7 - 0.6 / i - (0.03 if i == 8 else 0),
            "acceptance_length_low": 1.66 - 0.6 / i,
            "acceptance_length_high": 1.75 - 0.6 / i,
            "by_component": {"chat": 1.73 - 0.6 / i, "code_edit": 1.66 - 0.6 / i},
            "kept": i == 7,
        }
        for i in range(1, 9)
    ]
    return log, evals


def records():
    """What the other stages left: those without logs or measurements lie beside this file."""
    fixed = json.loads(Path(__file__).with_name("test_report_records.json").read_text())
    log, evals = train_logs()
    return fixed | {
        "train/train_log.jsonl": log,
        "train/evals.jsonl": evals,
        "measure/acceptance.json": acceptance_record(),
    }


def write_report(root, contents, *, online=False, sweep=None):
    provenance = contents.pop("provenance")
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = content if path.suffix == ".jsonl" else [content]
        path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    folder = root / "report"
    folder.mkdir()
    stages = ("prompts", "generate", "fit", "extract", "train", "measure", "predict", "export")
    inputs = {stage: root / stage for stage in stages}
    inputs["quantize"] = root / "quantize" if (root / "quantize").exists() else None
    if online:
        inputs["extract"] = None
    report.run(
        report.ReportJob(
            folder,
            **inputs,
            bench=None,
            provenance=provenance,
            matrix=[],
            report=ReportConfig(sweep=sweep),
        )
    )
    return folder


class _Text(HTMLParser):
    """What a reader sees, and what the page would fetch."""

    def __init__(self):
        super().__init__()
        self.parts, self.tags, self.fetched = [], [], []
        self.hidden = False

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.hidden = tag == "style"
        self.fetched += [v for name, v in attrs if name in ("src", "href", "srcset", "data")]

    def handle_endtag(self, _tag):
        self.hidden = False

    def handle_data(self, data):
        if not self.hidden:
            self.parts.append(data)

    @property
    def text(self):
        return " ".join("".join(self.parts).split())


def seen(html):
    parser = _Text()
    parser.feed(html)
    return parser


def both(folder):
    html = (folder / "report.html").read_text(encoding="utf-8")
    return seen(html).text, (folder / "report.md").read_text(encoding="utf-8")


@pytest.fixture
def blank_plots(monkeypatch):
    """Drawing takes seconds; tests of the text do without."""
    monkeypatch.setattr(plots, "save", lambda path, _: path.write_bytes(b"\x89PNG"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    contents = records()
    contents["measure/acceptance.json"] |= {"differences": [DIFFERENCE]}
    contents["measure/acceptance.json"]["rows"][5]["outputs_equal_plain"] = False
    return write_report(tmp_path_factory.mktemp("report"), contents)


def test_the_page_fetches_nothing(folder):
    html = (folder / "report.html").read_text(encoding="utf-8")
    found = seen(html)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in found.fetched)
    assert not {"script", "link", "iframe"} & set(found.tags)
    assert "url(" not in html
    assert "@import" not in html


def test_links_within_the_page_lead_somewhere(folder):
    html = (folder / "report.html").read_text(encoding="utf-8")
    ids = re.findall(r'id="([^"]+)"', html)
    assert len(set(ids)) == len(ids)
    assert {link[1:] for link in seen(html).fetched if link.startswith("#")} <= set(ids)


def test_every_image_has_words_in_its_place(folder):
    html = (folder / "report.html").read_text(encoding="utf-8")
    images = re.findall(r"<img [^>]+>", html)
    assert len(images) == 6
    assert all(re.search(r'alt="[^"]{20,}"', image) for image in images)


@pytest.mark.parametrize("page_idx", [0, 1], ids=["html", "markdown"])
def test_every_measured_figure_is_shown_with_its_interval(folder, page_idx):
    shown = both(folder)[page_idx]
    for row in acceptance_record()["rows"]:
        assert str(estimate(row, "acceptance_length")) in shown
        assert str(estimate(row, "tokens_per_second", digits=1)) in shown
        for s in row["acceptance_by_position"] + row["conditional_acceptance"]:
            assert f"{100 * s:.1f} %" in shown
        for key in ("acceptance_length_per_request_mean", "first_20_acceptance_length"):
            assert f"{row[key]:.2f}" in shown
        for key in ("num_prompts", "num_rounds", "num_tokens", "num_looped"):
            assert f"{row[key]:,}" in shown
        for bucket in row["by_context"]:
            assert f"{bucket['acceptance_length']:.2f}" in shown


@pytest.mark.parametrize("page_idx", [0, 1], ids=["html", "markdown"])
def test_a_difference_is_listed_with_its_margin_and_tokens(folder, page_idx):
    shown = both(folder)[page_idx].replace("\\\\n", "\\n")
    for part in ("dolly-0193", "41", "0.00173", '" the"', '" a\\n"'):
        assert part in shown


def test_an_answer_that_differs_is_said_first(folder):
    text = both(folder)[0]
    start = text.index("Greedy output equal to plain")
    assert text[start:].startswith("Greedy output equal to plainno1 answer apart")
    assert start < text.index("By kind of traffic")


@pytest.mark.usefixtures("blank_plots")
def test_the_verdict_compares_intervals(tmp_path):
    contents = records()
    for row in contents["measure/acceptance.json"]["rows"]:
        if row["proposer"] == "ngram":
            row["tokens_per_second_high"] = 30.0
    text, _ = both(write_report(tmp_path, contents))
    assert "faster than plain decoding and not told apart from ngram" in text


def test_the_opening_shows_the_k_with_most_tokens_per_second():
    record = acceptance_record(ks=(2, 3, 4))
    for row in record["rows"]:
        if row["proposer"] == "eagle3" and row["num_draft_tokens"] == 3:
            row["tokens_per_second"] += 1
    assert Acceptance.of(record).num_draft_tokens == 3


@pytest.mark.usefixtures("blank_plots")
def test_rows_of_another_k_and_temperature_are_shown_too(tmp_path):
    contents = records() | {"measure/acceptance.json": acceptance_record(ks=(2, 4))}
    _, text = both(write_report(tmp_path, contents))
    for row in contents["measure/acceptance.json"]["rows"]:
        k = "–" if row["proposer"] == "none" else row["num_draft_tokens"]  # noqa: RUF001
        setting = f"| {row['component']} | {row['temperature']:g} | {k} | {row['proposer']} |"
        assert f"{setting} {estimate(row, 'acceptance_length')} |" in text


@pytest.mark.usefixtures("blank_plots")
def test_a_mix_of_own_temperatures_opens_the_page(tmp_path):
    contents = records()
    rows = [r for r in contents["measure/acceptance.json"]["rows"] if r["temperature"] == 0]
    for row in rows:
        row["temperature"] = None if row["component"] == "all" else 0.0
    contents["measure/acceptance.json"]["rows"] = rows
    text, _ = both(write_report(tmp_path, contents))
    assert "On the mix, each component at its own temperature, eagle3 is faster" in text


MISSABLE = [
    ("measure/acceptance.json", "tokens_per_second", "Tokens/s, one request at a timenot measured"),
    ("measure/acceptance.json", "outputs_equal_plain", "equal to plainnot measured"),
    ("measure/acceptance.json", "draft_time_share", "(1.18–1.28)not measured"),  # noqa: RUF001
    ("train/train.json", "num_parameters", "parameters of the headnot measured"),
]


@pytest.mark.usefixtures("blank_plots")
@pytest.mark.parametrize(("name", "key", "shown"), MISSABLE, ids=[key for _, key, _ in MISSABLE])
def test_what_is_missing_is_shown_as_not_measured(tmp_path, name, key, shown):
    contents = records()
    for row in contents[name].get("rows", [contents[name]]):
        for missing in (key, f"{key}_low", f"{key}_high"):
            row.pop(missing, None)
    assert shown in both(write_report(tmp_path, contents))[0]


def test_nothing_optional_is_needed(tmp_path):
    contents = records()
    kept = ("component", "proposer", "temperature", "num_draft_tokens", "source", "split")
    kept = (*kept, "engine", "rows")
    whole = ("fit/fit.json", "predict/latency.json")  # written at once by one version
    for record in (record for name, record in contents.items() if name not in whole):
        for row in record if isinstance(record, list) else [*record.get("rows", []), record]:
            for key in set(row) - set(kept):
                del row[key]
    contents["train/train_log.jsonl"] = contents["train/evals.jsonl"] = []
    text, _ = both(write_report(tmp_path, contents, online=True))
    assert text.count("not measured") > 50
    assert "inside training" in text


def test_a_report_without_a_draft_model_is_refused():
    rows = [row for row in acceptance_record()["rows"] if row["proposer"] != "eagle3"]
    with pytest.raises(ValueError, match="must hold a row of a draft model"):
        Acceptance.of({"rows": rows})


@pytest.mark.usefixtures("blank_plots")
def test_markup_in_the_data_stays_text(tmp_path):
    contents, hostile = records(), "<img src=x onerror=alert(1)>|*`"
    contents["prompts/prompts.json"]["rows"][0]["source"] = hostile
    contents["measure/acceptance.json"]["differences"] = [DIFFERENCE | {"token": hostile}]
    provenance = contents["provenance"]
    provenance["command"] = provenance["profile"]["name"] = hostile
    provenance["config"]["note"] = hostile
    folder = write_report(tmp_path, contents)
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert seen(html).text.count(hostile) == 6
    assert "<img src=x" not in html
    cells = [line for line in both(folder)[1].splitlines() if "onerror" in line and line[0] == "|"]
    assert len(cells) == 3
    assert all("\\<img src=x onerror=alert(1)>\\|\\*\\`" in line for line in cells)


def test_plots_lie_beside_the_page_and_the_markdown_links_them(folder):
    pngs = {path.name for path in folder.glob("*.png")}
    assert pngs == {
        "acceptance_length.png",
        "survival.png",
        "tokens_per_second.png",
        "context.png",
        "predict.png",
        "training.png",
    }
    assert set(re.findall(r"\]\((\S+\.png)\)", both(folder)[1])) == pngs
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))


def test_the_record_holds_every_row(folder):
    record = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert len(record["acceptance"]["rows"]) == len(acceptance_record()["rows"])
    assert record["verdict"] in both(folder)[0]
    assert record["provenance"] == records()["provenance"]


@pytest.mark.usefixtures("blank_plots")
def test_a_sweep_is_written_beside_the_page(tmp_path):
    (tmp_path / "multirun" / "0").mkdir(parents=True)
    folder = write_report(tmp_path, records(), sweep=str(tmp_path / "multirun"))
    assert {path.name for path in folder.glob("sweep.*")} == {
        "sweep.html",
        "sweep.json",
        "sweep.md",
    }


def test_every_heading_that_needs_a_definition_has_one(folder):
    html = (folder / "report.html").read_text(encoding="utf-8")
    defined = set(re.findall(r'<dt id="([^"]+)"', html))
    terms = {"acceptance-length", "round", "own-token", "k", "survival", "coverage"}
    assert terms | {"conditional-acceptance"} <= defined


def test_a_table_of_ragged_rows_is_a_fault_of_ours():
    with pytest.raises(AssertionError):
        Table("t", [Column("a"), Column("b")], [["only one"]])


def test_page_and_markdown_of_nothing_are_still_documents():
    document = Document("t", "l", [], [])
    assert markdown.render(document) == "# t\n\nl\n"
    assert seen(page.render(document, Path())).text == "t t l"
