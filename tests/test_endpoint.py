"""The endpoint player against a small server that misbehaves as each test scripts it."""

from __future__ import annotations

import contextlib
import email.utils
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from klb_probe.dialogue.endpoint import EndpointPlayer, open_endpoint
from klb_probe.dialogue.player import Message, Reply, Request, Scene
from klb_probe.errors import KlbError

KEY = "sk-very-secret-0123456789"
SCHEMA = {"type": "object", "properties": {"eligible": {"type": "boolean"}}}


@dataclass
class Answer:
    """What the server does with a request."""

    body: bytes | dict
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    after: float = 0.0
    cut: int = 0  # bytes that are promised and not sent


@dataclass
class Seen:
    """A request as the server saw it."""

    at: float
    path: str
    headers: dict[str, str]
    sent: dict


class Server:
    """Answers the n-th request with ``script(request, n)``; notes requests and how many were open at once."""

    def __init__(self, script):
        self.script, self.seen, self.open, self.most_open = script, [], 0, 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                outer.handle(self)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads, self.http.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def handle(self, handler):
        sent = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        headers = {name.title(): value for name, value in handler.headers.items()}
        with self.lock:
            seen, number = Seen(time.monotonic(), handler.path, headers, sent), len(self.seen)
            self.seen.append(seen)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
        answer = self.script(seen, number)
        time.sleep(answer.after)
        with self.lock:
            self.open -= 1
        body = json.dumps(answer.body).encode() if isinstance(answer.body, dict) else answer.body
        with contextlib.suppress(ConnectionError):
            handler.send_response(answer.status)
            headers = {"Content-Type": "application/json", "Content-Length": str(len(body) + answer.cut)}
            for name, value in (headers | answer.headers).items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(body)


@pytest.fixture
def serve(monkeypatch):
    """Start servers that end with the test; nothing of this machine's environment leads elsewhere."""
    for name in ("KLB_API_KEY", "OPENAI_API_KEY", "KLB_BASE_URL", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers = []

    def start(script):
        servers.append(Server(script))
        return servers[-1]

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


def player(server, **settings):
    return EndpointPlayer("some-model", **{"base_url": server.url, "api_key": KEY, "backoff": 0.01} | settings)


def request(words="Hello?", **settings):
    known = {"conversation": "c", "stream": "s", "temperature": 0.7, "max_tokens": 50, "scene": Scene(None, None, "control")}
    return Request("agent", (Message("system", "Be brief."), Message("user", words)), **known | settings)


def says(text="Yes.", *, finish="stop", usage=(11, 3), after=0.0, **message):
    tokens = dict(zip(("prompt_tokens", "completion_tokens"), usage, strict=False))
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text, **message}}
    return Answer({"id": "x", "object": "chat.completion", "choices": [choice], "usage": tokens}, after=after)


def fails(status, message="Went wrong.", *, retry_after=None, after=0.0, **error):
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return Answer({"error": {"message": message, **error}}, status, headers, after)


def until(condition):
    """Wait for what other threads are about to do, but not for ever."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def first(fault, then=None):
    """A script: the fault for the first request, all well afterwards."""
    return lambda _, number: fault if number == 0 else then or says()


def test_what_is_sent_and_what_comes_back(serve):
    server = serve(lambda *_: says())
    assert player(server).reply([request(schema=SCHEMA)]) == [Reply("Yes.", prompt_tokens=11, completion_tokens=3)]
    (seen,) = server.seen
    assert isinstance(seen.sent.pop("seed"), int)
    assert seen.sent == {
        "model": "some-model",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}],
        "temperature": 0.7,
        "max_tokens": 50,
    }
    assert seen.path == "/v1/chat/completions"
    assert seen.headers["Authorization"] == f"Bearer {KEY}"


def test_no_requests_no_replies(serve):
    server = serve(lambda *_: says())
    assert player(server).reply([]) == []
    assert server.seen == []


def test_tokens_that_are_not_told_count_as_none(serve):
    bare = says("")
    del bare.body["usage"]
    one = player(serve(first(bare, says(usage=(None, None)))))
    assert one.reply([request()]) == [Reply("")]
    assert one.reply([request()]) == [Reply("Yes.")]


def test_half_an_emoji_can_be_sent(serve):
    server = serve(lambda *_: says())
    (reply,) = player(server).reply([request("half \ud83d, whole \ud83d\ude00")])
    assert reply.text == "Yes."
    assert server.seen[0].sent["messages"][1]["content"] == "half \ufffd, whole \U0001f600"


PASSING = {
    "500": (fails(500, "Out of order."), "answered 500: Out of order."),
    "503 in HTML": (Answer(b"<h1>Bad\n gateway</h1>", 503), "answered 503: <h1>Bad gateway</h1>"),
    "502 without a word": (Answer(b"", 502), "answered 502: Bad Gateway"),
    "408": (fails(408), "answered 408"),
    "409": (fails(409), "answered 409"),
    "429": (fails(429, "Slow down."), "answered 429: Slow down."),
    "429, Retry-After of no use": (fails(429, retry_after="soon"), "answered 429"),
    "429, Retry-After for ever": (fails(429, retry_after="inf"), "answered 429"),
    "timeout": (says(after=1.2), "no answer within 0.5 s"),
    "truncated JSON": (Answer(b'{"choices": [{"message": {"content": "Ye'), "is no completion: {"),
    "cut off": (Answer(b'{"choices": [{"mess', cut=40), "connection failed: "),
    "empty body": (Answer(b""), "is no completion: it is empty"),
    "HTML": (Answer(b"<h1>Log in</h1>", headers={"Content-Type": "text/html"}), "is no completion: <h1>"),
    "not an object": (Answer(b"[]"), "is no completion: []"),
    "empty choices": (Answer({"choices": []}), "no choices"),
    "null choices": (Answer({"choices": None, "error": {"message": "Overloaded."}}), "no choices Overloaded."),
    "null content": (says(None, finish="length"), "no content (finish reason length)"),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes_is_not_noticed(serve, name):
    server = serve(first(PASSING[name][0]))
    timeout = 0.5 if name == "timeout" else 10
    assert [reply.text for reply in player(server, timeout=timeout).reply([request()])] == ["Yes."]
    assert len(server.seen) == 2
    assert server.seen[0].sent == server.seen[1].sent


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_stays_is_the_reply_s_error(serve, name):
    fault, what = PASSING[name]
    timeout = 0.5 if name == "timeout" else 10
    server = serve(lambda seen, _: says() if seen.sent["messages"][1]["content"] == "well" else fault)
    ill, well = player(server, timeout=timeout, retries=1).reply([request("ill"), request("well")])
    assert well.text == "Yes."
    assert ill.text == ""
    assert what in ill.error
    assert ill.error.endswith("(tried 2 times)")
    assert len(server.seen) == 3


def test_a_server_that_is_not_there(serve):
    server = serve(lambda *_: says())
    gone = player(server, retries=1)
    server.http.shutdown()
    server.http.server_close()
    (reply,) = gone.reply([request()])
    assert "connection failed: " in reply.error
    assert "refused" in reply.error


def test_waits_double(serve, monkeypatch):
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    server = serve(lambda *_: fails(500))
    (reply,) = player(server, retries=3, backoff=0.1).reply([request()])
    assert "tried 4 times" in reply.error
    times = [seen.at for seen in server.seen]
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert all(wait <= gap < wait + 0.4 for wait, gap in zip([0.1, 0.2, 0.4], gaps, strict=True))


@pytest.mark.parametrize(
    ("limit", "settings", "shortest"),
    [
        (fails(429, retry_after=0.5), {}, 0.5),
        (fails(503, retry_after=0.5), {}, 0.5),
        (fails(429), {"backoff": 1.0}, 0.5),
        (fails(429, retry_after=0.01), {"backoff": 1.0}, 0.5),  # Retry-After does not shorten the back-off
    ],
)
def test_at_a_limit_every_thread_waits(serve, limit, settings, shortest):

    def script(_, number):
        until(lambda: len(server.seen) >= 2)
        return limit if number == 0 else says(after=0.1)

    server = serve(script)
    replies = player(server, max_in_flight=2, **settings).reply([request() for _ in range(6)])
    assert [reply.text for reply in replies] == ["Yes."] * 6
    # Two were under way when the first was turned down; the other thread was done soon after and had more to do.
    start, times = server.seen[0].at, sorted(seen.at for seen in server.seen)
    assert len(times) == 7
    assert shortest - 0.02 <= times[2] - start < 5


def test_a_fault_of_one_request_holds_up_no_other(serve):
    server = serve(first(fails(500)))
    player(server, max_in_flight=2, backoff=2).reply([request() for _ in range(6)])
    times = sorted(seen.at - server.seen[0].at for seen in server.seen)
    assert times[5] < 0.9
    assert times[6] >= 0.98


def test_retry_after_may_be_a_date(serve):
    def script(_, number):
        return fails(429, retry_after=email.utils.formatdate(time.time() + 2, usegmt=True)) if number == 0 else says()

    server = serve(script)
    assert player(server).reply([request()])[0].text == "Yes."
    assert 0.9 <= server.seen[1].at - server.seen[0].at <= 5  # dates have whole seconds


def test_a_day_is_not_waited_for(serve):
    server = serve(lambda *_: fails(429, "Daily quota.", retry_after=86400))
    (reply,) = player(server).reply([request()])
    assert reply.error == "the provider answered 429: Daily quota.; the provider asks to wait 86400 s"
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (fails(400, "Against our\n policy."), "Against our policy."),
        (fails(400, "x" * 5000), "x" * 300 + "…"),
        (fails(413, "Too long."), "Too long."),
        (fails(403, "Flagged.", metadata={"flagged_input": "…", "reasons": ["violence"]}), "Flagged."),
        (fails(403, "Flagged.", code="content_policy_violation"), "Flagged."),
        (says("So f", finish="content_filter"), "content_filter"),
        (says(None, finish="content_filter"), "content_filter"),
        (says(None, refusal="I can't."), "I can't."),
    ],
)
def test_a_refusal_concerns_one_reply(serve, refusal, words):
    server = serve(lambda seen, _: refusal if seen.sent["messages"][1]["content"] == "bad" else says())
    replies = player(server).reply([request("a"), request("bad"), request("b")])
    assert [reply.text for reply in replies] == ["Yes.", "", "Yes."]
    assert [reply.error for reply in replies] == [None, f"refused by the provider: {words}", None]
    assert replies[1].prompt_tokens == (11 if refusal.status == 200 else 0)
    assert len(server.seen) == 3


@pytest.mark.parametrize(
    ("status", "hint"),
    [(401, "KLB_API_KEY"), (402, "credit"), (403, "may not use this model"), (404, "the model's name and the base URL")],
)
def test_what_every_request_would_meet_stops_the_run(serve, status, hint):
    server = serve(lambda *_: fails(status, "No such\nthing."))
    with pytest.raises(KlbError) as error:
        player(server, max_in_flight=1).reply([request() for _ in range(5)])
    assert str(error.value).startswith(f"some-model at {server.url} answered {status}: No such thing.; ")
    assert hint in str(error.value)
    assert len(server.seen) == 1


@pytest.mark.parametrize("ill", [fails(500), fails(429, retry_after=60)], ids=["backing off", "pausing"])
def test_a_stopped_run_waits_for_nobody(serve, ill):
    answers = {"ill": ill, "slow": says(after=60), "wrong": fails(401, after=0.3)}

    def script(seen, _):
        until(lambda: len(server.seen) == 3)
        return answers[seen.sent["messages"][1]["content"]]

    server = serve(script)
    start = time.monotonic()
    with pytest.raises(KlbError, match="answered 401"):
        player(server, backoff=60).reply([request("ill"), request("wrong"), request("slow")])
    assert time.monotonic() - start < 10


def test_nothing_is_sent_after_an_interrupt(serve):
    server = serve(lambda *_: fails(429, retry_after=0.6))

    def interrupt():
        until(lambda: len(server.seen) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    # A shell that starts a job in the background makes it ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            player(server, max_in_flight=2).reply([request() for _ in range(5)])
    finally:
        signal.signal(signal.SIGINT, before)
    time.sleep(0.9)
    assert len(server.seen) == 2


REFUSED_PARAMETERS = [
    ("max_tokens", "Unsupported parameter: 'max_tokens' is not supported, use 'max_completion_tokens'.", 400, "max_tokens"),
    ("temperature", "Unsupported value: 'temperature' does not support 0.7 with this model.", 400, "temperature"),
    ("temperature", "With max_tokens and a seed, temperature is not supported.", 400, "temperature"),
    ("temperature", "`temperature` is deprecated for this model.", 400, None),
    ("seed", 'Invalid JSON payload received. Unknown name "seed": Cannot find field.', 400, None),
    ("seed", {"detail": [{"loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]}, 422, None),
]


@pytest.mark.parametrize(("name", "words", "status", "param"), REFUSED_PARAMETERS)
def test_an_unsupported_parameter_is_left_out_from_then_on(serve, name, words, status, param):
    server = serve(lambda seen, _: fails(status, words, param=param) if name in seen.sent else says())
    one = player(server, retries=0)
    assert one.record()["unsupported"] == []
    assert [one.reply([request()])[0].text for _ in range(2)] == ["Yes.", "Yes."]
    assert one.record()["unsupported"] == [name]
    assert [name in seen.sent for seen in server.seen] == [True, False, False]
    assert server.seen[1].sent.get("max_completion_tokens") == (50 if name == "max_tokens" else None)
    others = {"temperature", "max_tokens", "seed"} - {name}
    assert all(others <= seen.sent.keys() for seen in server.seen)


def test_all_parameters_may_be_unsupported(serve):
    def script(seen, _):
        wrong = next((name for name in ("seed", "temperature", "max_tokens") if name in seen.sent), None)
        return fails(400, f"{wrong} is unsupported") if wrong else says()

    server = serve(script)
    one = player(server, retries=0)
    assert one.reply([request()])[0].text == "Yes."
    assert server.seen[-1].sent.keys() == {"model", "messages", "max_completion_tokens"}
    assert one.record()["unsupported"] == ["max_tokens", "seed", "temperature"]


@pytest.mark.parametrize(
    "words",
    [
        "max_tokens is too large: 50. This model supports at most 40 completion tokens.",
        "The model does not support what you ask about.",
        "n is not supported",
    ],
)
def test_another_complaint_is_no_unsupported_parameter(serve, words):
    server = serve(lambda *_: fails(400, words))
    one = player(server)
    assert one.reply([request()])[0].error == f"refused by the provider: {words}"
    assert one.record()["unsupported"] == []
    assert len(server.seen) == 1


def test_what_did_not_help_is_not_remembered(serve):
    server = serve(lambda seen, _: fails(400, "seed is not supported" if "seed" in seen.sent else "Against our policy."))
    one = player(server)
    assert one.reply([request()])[0].error == "refused by the provider: Against our policy."
    assert one.record()["unsupported"] == []


def test_json_mode_asks_for_as_much_as_the_server_can_do(serve):
    named = {"name": "agent", "schema": SCHEMA, "strict": True}
    strict, loose = {"type": "json_schema", "json_schema": named}, {"type": "json_object"}
    complaints = {"json_schema": "Invalid schema for response_format 'agent'.", "json_object": "response_format: use text."}
    known = {"json_schema", "json_object"}

    def script(seen, _):
        kind = seen.sent.get("response_format", {}).get("type")
        return fails(400, complaints[kind]) if kind and kind not in known else says()

    server = serve(script)
    one = player(server, json_mode=True)
    for supported, expected in [
        (("json_schema", "json_object"), [strict]),
        (("json_object",), [strict, loose]),
        (("json_object",), [loose]),
        ((), [loose, None]),
        ((), [None]),
    ]:
        known, before = set(supported), len(server.seen)
        assert one.reply([request(schema=SCHEMA)])[0].text == "Yes."
        assert [seen.sent.get("response_format") for seen in server.seen[before:]] == expected
    known = {"json_schema", "json_object"}
    fresh = player(server, json_mode=True)
    fresh.reply([request()])
    assert "response_format" not in server.seen[-1].sent


@pytest.mark.parametrize("most", [1, 4, 8])
def test_order_is_kept_and_no_more_than_asked_are_under_way(serve, most):
    def script(seen, number):
        until(lambda: server.most_open == most)
        word = seen.sent["messages"][1]["content"]
        if word == "0" and most > 1:  # the first to come is the last to be answered
            until(lambda: len(server.seen) == 12)
        return says(word, after=0.1)

    server = serve(script)
    words = [str(number) for number in range(12)]
    assert [reply.text for reply in player(server, max_in_flight=most).reply([request(word) for word in words])] == words
    assert server.most_open == most


def seeds(serve, calls, *, seed=0, script=lambda *_: says()):
    """The seeds that the server saw, by stream, in order of the calls."""
    server = serve(script)
    one = player(server, seed=seed, max_in_flight=1)
    for streams in calls:
        one.reply([request(stream=stream) for stream in streams])
    return [seen.sent["seed"] for seen in server.seen]


def test_the_nth_request_of_a_stream_has_its_seed(serve):
    a1, b1, a2, b2 = seeds(serve, [["a", "b"], ["a", "b"]])
    assert len({a1, b1, a2, b2}) == 4
    assert max(seeds(serve, [["a"] * 40])) < 2**31  # the largest that every kind of server takes
    assert seeds(serve, [["a"], ["a"], ["c", "b", "b"]])[:2] == [a1, a2]
    assert seeds(serve, [["b", "b", "a"]]) == [b1, b2, a1]
    assert not set(seeds(serve, [["a", "b"], ["a", "b"]], seed=1)) & {a1, b1, a2, b2}
    assert seeds(serve, [["a"], ["a"]], script=first(fails(500))) == [a1, a1, a2]


ECHOES = {
    "401": lambda seen, _: fails(401, f"Bad key {seen.headers['Authorization']}"),
    "400": lambda seen, _: fails(400, f"Bad key {seen.headers['Authorization']}"),
    "long 400": lambda seen, _: fails(400, "x" * 285 + seen.headers["Authorization"]),
    "500": lambda seen, _: Answer(seen.headers["Authorization"].encode(), 500),
    "HTML": lambda seen, _: Answer(f"<h1>{seen.headers['Authorization']}</h1>".encode()),
    "no choices": lambda seen, _: Answer({"choices": [], "error": {"got": seen.headers["Authorization"]}}),
    "refusal": lambda seen, _: says(None, refusal=f"You sent {seen.headers['Authorization']}"),
    "content": lambda seen, _: says(f"You sent {seen.headers['Authorization']}"),
}


@pytest.mark.parametrize("name", ECHOES)
def test_the_key_goes_nowhere_else(serve, caplog, name):
    caplog.set_level(logging.DEBUG)
    one = player(serve(ECHOES[name]), retries=1)
    try:
        said = repr(one.reply([request()]))
    except KlbError as error:
        said = "".join(traceback.format_exception(error))
        while error.__context__ or error.__cause__:
            error = error.__cause__ or error.__context__
            said += repr(error) + repr(vars(error))
    assert "Bearer" in said
    assert KEY[:6] not in said
    assert KEY not in caplog.text + repr(one) + json.dumps(one.record())
    assert caplog.text


def test_a_placeholder_is_not_taken_for_a_secret(serve):
    one = player(serve(lambda *_: fails(400, "an example")), api_key="x")
    assert one.reply([request()])[0].error == "refused by the provider: an example"


def test_record_and_repr(serve):
    server = serve(lambda *_: says())
    one = player(server, seed=7, retries=2, json_mode=True)
    assert one.record() == {
        "kind": "endpoint",
        "model": "some-model",
        "base_url": server.url,
        "seed": 7,
        "json_mode": True,
        "max_in_flight": 8,
        "timeout": 120.0,
        "retries": 2,
        "unsupported": [],
    }
    assert repr(one) == f"EndpointPlayer('some-model', base_url='{server.url}')"
    assert one.name == "endpoint:some-model"
    one.forget("c")


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.test_endpoint import EndpointPlayer, request
one = EndpointPlayer("m", base_url=sys.argv[1], api_key="x", max_in_flight=2)
try:
    one.reply([request() for _ in range(5)])
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("fault", [says(after=30), fails(429, retry_after=200)], ids=["under way", "pausing"])
def test_an_interrupt_ends_the_program_at_once(serve, fault):
    server = serve(lambda *_: fault)
    command, root = [sys.executable, "-c", INTERRUPTED, server.url], Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        try:
            while len(server.seen) < 2:
                assert process.poll() is None
                time.sleep(0.05)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            start = time.monotonic()
            assert process.communicate(timeout=10)[0] == "interrupted\n"
        finally:
            process.kill()
    assert time.monotonic() - start < 5
    assert process.returncode == 0
    assert len(server.seen) == 2


def test_specs_and_environment(serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "open-key")
    assert open_endpoint("endpoint:gpt-x").base_url == "https://api.openai.com/v1"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://open.example/v1")
    assert open_endpoint("endpoint:gpt-x").base_url == "http://open.example/v1"
    monkeypatch.setenv("KLB_BASE_URL", " http://klb.example:81/v1/ ")
    assert open_endpoint("endpoint:gpt-x").base_url == "http://klb.example:81/v1"
    one = open_endpoint("endpoint:@cf/meta/llama@2:8b@https://spec.example/a/v1", json_mode=True, seed=3)
    assert (one.model, one.base_url) == ("@cf/meta/llama@2:8b", "https://spec.example/a/v1")
    assert (one.record()["json_mode"], one.seed) == (True, 3)

    server = serve(lambda *_: says())
    for variable, key in [("OPENAI_API_KEY", "open-key"), ("KLB_API_KEY", "klb-key")]:
        monkeypatch.setenv(variable, key)
        open_endpoint(f"endpoint:m@{server.url}").reply([request()])
        assert server.seen[-1].headers["Authorization"] == f"Bearer {key}"


@pytest.mark.usefixtures("serve")
def test_without_a_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", " ")
    with pytest.raises(KlbError, match=r"no key for endpoint:gpt-x: set KLB_API_KEY \(or OPENAI_API_KEY\); any value for"):
        open_endpoint("endpoint:gpt-x")


@pytest.mark.usefixtures("serve")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("endpoint:", "an endpoint is endpoint:MODEL"),
        ("gpt-x", "an endpoint is endpoint:MODEL"),
        ("endpoint:gpt-x@localhost:8000/v1", "has to start with http"),
        ("endpoint:gpt-x@localhost/v1", "has to start with http"),
        ("endpoint:gpt-x@10.0.0.7:8000", "has to start with http"),
        ("endpoint:gpt-x@http://", "not of the form"),
        ("endpoint:gpt-x@http://host:port/v1", "not of the form"),
        ("endpoint:gpt-x@http://[::1/v1", "not of the form"),
        ("endpoint:gpt-x@https://me:hunter2@host.example/v1", "base URL of host.example may not hold credentials"),
        ("endpoint:gpt-x@https://host.example/v1?key=hunter2", "base URL of host.example may not hold credentials"),
    ],
)
def test_specs_that_are_none(monkeypatch, spec, message):
    monkeypatch.setenv("KLB_API_KEY", "x")
    with pytest.raises(KlbError, match=message) as error:
        open_endpoint(spec)
    assert "hunter2" not in str(error.value)


@pytest.mark.usefixtures("serve")
def test_the_client_s_own_default_is_looked_at_too(monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "https://me:hunter2@host.example/v1")
    with pytest.raises(KlbError, match="may not hold credentials"):
        EndpointPlayer("m", base_url=None, api_key="x")


@pytest.mark.parametrize("key", ["", "sk-1 2", "sk-1\n", "sk-\u201cquoted\u201d"])
def test_a_key_that_cannot_be_sent_is_refused_unquoted(key):
    with pytest.raises(KlbError, match="set KLB_API_KEY anew") as error:
        EndpointPlayer("m", base_url="http://h/v1", api_key=key)
    assert "sk-" not in str(error.value)


def test_something_has_to_be_under_way():
    with pytest.raises(KlbError, match="max_in_flight 0 for m"):
        EndpointPlayer("m", base_url="http://h/v1", api_key="x", max_in_flight=0)
