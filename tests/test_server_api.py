"""The server as OpenAI's client sees it: answers, streams, and the counters beside them."""

import threading
from collections import Counter
from dataclasses import replace

import openai
import pytest
import tiny_server
import torch
from hash_target import chi_square_p_value
from tiny_server import MODEL, metrics, opened, running

from specfit.targets.text import TargetText
from specfit_serve.decode import DecodeSettings, Request, decode
from specfit_serve.ngram import NoProposer
from specfit_serve.stats import DecodeStats
from specfit_serve.verify import target_distribution

PROMPTS = ["def add(a, b):", "The weather", "for i in", "Write", "x"]
MESSAGES = [{"role": "user", "content": "Write a Python function that adds two numbers."}]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_server.load_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def exported(target, tmp_path_factory):
    return tiny_server.export(target, tmp_path_factory.mktemp("exported"))


@pytest.fixture(scope="module")
def text(target):
    return TargetText(target.tokenizer)


@pytest.fixture(scope="module")
def served(target, exported):
    with running(opened(target, exported)) as found:
        yield found
    assert found.failed == []


@pytest.fixture
def client(served):
    return served.client


@pytest.fixture(scope="module")
def plain(target, exported):
    """Answers of the loop itself, without drafts, to prompts of tokens."""
    slots = opened(target, exported, proposer=tiny_server.Drafts.none)._target

    def answers(prompts, max_new_tokens):
        requests = [Request(str(i), p, 0.0) for i, p in enumerate(prompts)]
        settings = DecodeSettings(0, max_new_tokens, batch_size=1)
        found = {a.id: a for a in decode(slots, NoProposer(), requests, settings)}
        return [found[str(i)] for i in range(len(prompts))]

    return answers


def complete(client, prompt, **options):
    options = {"temperature": 0, "max_tokens": 16} | options
    return client.completions.create(model=MODEL, prompt=prompt, **options)


def chat(client, **options):
    options = {"temperature": 0, "max_tokens": 16, "messages": MESSAGES} | options
    return client.chat.completions.create(model=MODEL, **options)


def pieced(chunks):
    """Text, finish reason and chunks of each choice of a stream."""
    texts, reasons, num = {}, {}, Counter()
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta.content or "" if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + delta
            num[choice.index] += 1
            reasons[choice.index] = choice.finish_reason
    return texts, reasons, num


# --- What an answer is ---


def test_greedy_text_is_that_of_plain_decoding(client, plain, text):
    tokens = [text.encode(prompt) for prompt in PROMPTS]
    expected = [text.decode(a.tokens) for a in plain(tokens, 16)]
    assert [complete(client, prompt).choices[0].text for prompt in PROMPTS] == expected
    # All in one request, as text and as tokens.
    for prompts in (PROMPTS, tokens):
        found = complete(client, prompts)
        assert [choice.text for choice in found.choices] == expected
        assert [choice.index for choice in found.choices] == list(range(len(PROMPTS)))
    assert complete(client, tokens[0]).choices[0].text == expected[0]


def test_a_conversation_is_rendered_by_the_targets_template(client, target, plain, text):
    ids = target.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    (expected,) = plain([ids], 16)
    found = chat(client, extra_body={"return_token_ids": True})
    assert found.prompt_token_ids == ids
    assert found.choices[0].token_ids == expected.tokens
    assert found.choices[0].message.content == text.decode(expected.tokens)
    assert found.choices[0].message.role == "assistant"
    assert found.object == "chat.completion"
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), len(expected.tokens))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "n": 2, "seed": 5}])
def test_a_stream_says_what_a_whole_answer_says(client, options):
    for ask in (chat, lambda client, **o: complete(client, PROMPTS[:2], **o)):
        whole = ask(client, **options)
        texts, reasons, num = pieced(ask(client, stream=True, **options))
        for choice in whole.choices:
            said = choice.message.content if hasattr(choice, "message") else choice.text
            assert texts[choice.index] == said
            assert reasons[choice.index] == choice.finish_reason
        assert len(texts) == len(whole.choices)
        assert max(num.values()) > 2


def test_a_stream_ends_with_the_usage_where_it_is_asked_for(client):
    whole = chat(client, n=2)
    *chunks, last = chat(client, n=2, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage == whole.usage
    assert {chunk.usage for chunk in chunks} == {None}
    assert all(chunk.choices for chunk in chat(client, stream=True))


def test_a_stream_is_events_up_to_done(served):
    body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 4}
    with served.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


def test_a_stream_has_no_replacement_that_the_text_has_not(client, plain, text):
    # A random target says many bytes that are no characters, and parts of some that are.
    for prompt, answer in zip(PROMPTS, plain([text.encode(p) for p in PROMPTS], 30), strict=True):
        expected = text.decode(answer.tokens)
        chunks = [c.choices[0].text for c in complete(client, prompt, max_tokens=30, stream=True)]
        assert "".join(chunks) == expected
        assert all(not chunk.endswith("\N{REPLACEMENT CHARACTER}") for chunk in chunks[:-1])


@pytest.mark.parametrize("size", [1, 4, 9])
def test_a_stop_string_ends_the_text_before_it_wherever_tokens_end(client, size):
    whole = complete(client, PROMPTS[0], max_tokens=24).choices[0].text
    for at in (3, 12):
        stop = whole[at : at + size]
        expected = whole[: whole.index(stop)]
        found = complete(client, PROMPTS[0], max_tokens=24, stop=[stop, "never said"])
        choice = found.choices[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (expected, "stop", stop)
        texts, reasons, _ = pieced(
            complete(client, PROMPTS[0], max_tokens=24, stop=stop, stream=True)
        )
        assert (texts[0], reasons[0]) == (expected, "stop")


def test_a_stop_string_costs_no_more_tokens_than_it_takes(client, text):
    whole = complete(client, PROMPTS[0], max_tokens=24, extra_body={"return_token_ids": True})
    ids = whole.choices[0].token_ids
    stop = text.decode(ids[:9])[-2:]
    # The first token with which the text has the stop.
    needed = next(n for n in range(1, 24) if stop in text.decode(ids[:n]))
    found = complete(client, PROMPTS[0], max_tokens=24, stop=stop)
    assert found.usage.completion_tokens == needed


def test_a_stop_token_ends_the_answer_and_is_no_text(client, text):
    ids = complete(client, PROMPTS[0], extra_body={"return_token_ids": True}).choices[0].token_ids
    stop = ids[5]
    first = ids.index(stop)
    found = complete(client, PROMPTS[0], extra_body={"stop_token_ids": [stop]})
    choice = found.choices[0]
    assert choice.text == text.decode(ids[:first])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert found.usage.completion_tokens == first + 1


def test_a_looping_answer_is_stopped_and_says_so(target, exported):
    # A head of zeros but one row: whatever is asked, token 65 follows.
    server = opened(target, exported, proposer=tiny_server.Drafts.none)
    forward = server._target.forward

    def constant(*args, **kwargs):
        output = forward(*args, **kwargs)
        logits = torch.zeros_like(output.logits)
        logits[..., 65] = 9
        return replace(output, logits=logits)

    server._target.forward = constant
    with running(server) as found:
        choice = complete(found.client, "x", max_tokens=60).choices[0]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", "repetition")
        ignoring = complete(found.client, "x", max_tokens=60, extra_body={"ignore_eos": True})
        assert ignoring.choices[0].finish_reason == "length"
        assert ignoring.usage.completion_tokens == 60
        assert metrics(found.http)["vllm:request_success_total stop"] == 1


def test_an_answer_is_as_long_as_asked(client):
    for length in (1, 2, 7, 33):
        found = complete(client, "x", max_tokens=length, extra_body={"ignore_eos": True})
        assert found.usage.completion_tokens == length
        assert found.choices[0].finish_reason == "length"


# --- Logprobs ---


def test_logprobs_of_a_conversation_are_the_targets(client, target):
    found = chat(
        client, logprobs=True, top_logprobs=3, max_tokens=8, extra_body={"return_token_ids": True}
    )
    prompt, tokens = found.prompt_token_ids, found.choices[0].token_ids
    with torch.no_grad():
        logits = target.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    own = torch.log_softmax(logits, -1)
    content = found.choices[0].logprobs.content
    assert len(content) == len(tokens)
    for row, token, one in zip(own, tokens, content, strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [t.logprob for t in one.top_logprobs] == pytest.approx(
            row.topk(3).values.tolist(), abs=1e-4
        )
        assert one.top_logprobs[0].token == one.token  # greedy
    said = b"".join(bytes(one.bytes) for one in content)
    assert said.decode(errors="replace") == found.choices[0].message.content


def test_logprobs_of_a_completion_line_up_with_its_tokens(client, text):
    options = {"logprobs": 2, "max_tokens": 8, "extra_body": {"return_token_ids": True}}
    choice = complete(client, "def", **options).choices[0]
    logprobs = choice.logprobs
    assert logprobs.tokens == [text.piece(i)[0] for i in choice.token_ids]
    assert logprobs.text_offset[0] == 0
    lengths = [len(t) for t in logprobs.tokens]
    assert logprobs.text_offset == [sum(lengths[:i]) for i in range(len(lengths))]
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == max(top.values()) == logprob
    chunks = list(complete(client, "def", stream=True, **options))
    streamed = [c.choices[0].logprobs for c in chunks]
    assert [t for s in streamed for t in s.tokens] == logprobs.tokens
    assert [o for s in streamed for o in s.text_offset] == logprobs.text_offset


# --- Sampling ---


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 0.4), (0.5, 0.7)])
def test_sampled_tokens_have_the_targets_distribution(client, target, text, temperature, top_p):
    prompt, num = text.encode("def"), 10

    @torch.no_grad()
    def next_probs(contexts):
        logits = target.model(torch.tensor(contexts)).logits[:, -1:]
        return target_distribution(logits, torch.full((len(contexts),), temperature), top_p)[:, 0]

    (first,) = next_probs([prompt])
    firsts = first.nonzero()[:, 0].tolist()
    second = first[firsts] @ next_probs([[*prompt, token] for token in firsts])
    counts = Counter()
    for i in range(num):
        # Of three tokens the second is of a round that drafts one.
        options = {"temperature": temperature, "top_p": top_p, "n": 16, "max_tokens": 3, "seed": i}
        extra = {"return_token_ids": True, "ignore_eos": True}
        found = complete(client, prompt, extra_body=extra, **options)
        counts.update(choice.token_ids[1] for choice in found.choices)
    expected = {token: 16 * num * p for token, p in enumerate(second.tolist()) if p > 0}
    assert set(counts) <= set(expected)
    assert chi_square_p_value(counts, expected) > 1e-3


def test_a_seed_decides_an_answer_whoever_shares_the_batch(client):
    def sampled(**options):
        return [c.text for c in complete(client, "x", temperature=1.0, **options).choices]

    (alone,) = sampled(seed=11)
    among = [None] * 4

    def ask(i):
        among[i] = sampled(seed=11) if i == 2 else sampled(seed=i, n=2)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert among[2] == [alone]
    several = sampled(seed=11, n=3)
    assert several[0] == alone
    assert len(set(several)) == 3
    assert sampled() != sampled()


# --- Counters ---


def test_counters_add_up_when_answers_are_cut_short(target, exported):
    with running(opened(target, exported)) as found:
        whole = complete(found.client, PROMPTS[0]).choices[0].text
        complete(found.client, PROMPTS[0], stop=whole[4:6])
        next(iter(stream := chat(found.client, stream=True, n=2, max_tokens=100)))
        stream.close()
        tiny_server.wait_until(lambda: metrics(found.http)["vllm:num_requests_running"] == 0)
        seen = metrics(found.http)
    ended = [seen[f"vllm:request_success_total {why}"] for why in ("stop", "length", "abort")]
    assert ended == [1, 1, 2]
    # Of every answer the first token is of its prefill, the others are of rounds.
    firsts = seen["vllm:time_to_first_token_seconds_count"]
    num_rounds = seen["vllm:inter_token_latency_seconds_count"]
    kept = seen["vllm:spec_decode_num_accepted_tokens_total"]
    assert seen["vllm:generation_tokens_total"] == firsts + num_rounds + kept


def test_counters_of_whole_answers_are_the_loops_own(target, exported, text):
    prompts = [text.encode(p) for p in PROMPTS]
    server = opened(target, exported)
    settings = DecodeSettings(4, 30, batch_size=4)
    requests = [Request(str(i), p, 0.0) for i, p in enumerate(prompts)]
    answers = list(decode(server._target, server._proposer, requests, settings))
    rounds = [r for answer in answers for r in answer.rounds]
    stats = DecodeStats.from_rounds(rounds, 4)
    with running(opened(target, exported)) as found:
        usage = complete(found.client, PROMPTS, max_tokens=30).usage
        seen = metrics(found.http)
    total = "vllm:spec_decode_num_{}_total"
    assert seen[total.format("drafts")] == sum(r.num_drafted > 0 for r in rounds)
    assert seen[total.format("draft_tokens")] == sum(r.num_drafted for r in rounds)
    assert seen[total.format("accepted_tokens")] == sum(r.num_kept for r in rounds) > 0
    for i, kept in enumerate(stats.kept_by_position):
        assert seen[f"{total.format('accepted_tokens_per_pos')} {i}"] == kept
    assert seen["vllm:generation_tokens_total"] == usage.completion_tokens
    assert usage.completion_tokens == sum(len(a.tokens) for a in answers)
    assert seen["vllm:prompt_tokens_total"] == usage.prompt_tokens == sum(map(len, prompts))
    assert seen["vllm:inter_token_latency_seconds_count"] == len(rounds)
    assert seen["vllm:time_to_first_token_seconds_count"] == len(PROMPTS)
    assert seen["vllm:request_success_total length"] + seen["vllm:request_success_total stop"] == 5


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == (MODEL, 160)


def test_many_clients_at_once_get_what_each_gets_alone(served):
    def ask(i):
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
            prompt = f"{PROMPTS[i % 5]} {i}"
            options = {"temperature": 1.0, "seed": i} if i % 2 else {}
            options["max_tokens"] = 10
            if i % 3:
                return complete(client, prompt, **options).choices[0].text
            return pieced(complete(client, prompt, stream=True, **options))[0][0]

    found = [None] * 16

    def keep(i):
        found[i] = ask(i)

    threads = [threading.Thread(target=keep, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [ask(i) for i in range(16)]
