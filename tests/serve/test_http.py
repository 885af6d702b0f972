"""What the official client never does: raw sockets, missing keys, bodies too large, full queues, clients that leave."""

from __future__ import annotations

import http.client
import json
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from tests.serve.serving import Serving, serving
from vblackwell.errors import VBError
from vblackwell.serve.http import connection
from vblackwell.serve.http.running import Limits
from vblackwell.serve.http.wire import CHAT_FIELDS, COMPLETION_FIELDS, EMBEDDING_FIELDS, Reply

LIMITS = Limits(body_bytes=20_000, body_seconds=0.4, keep_alive_seconds=0.02)
GO_ON = {"256": -100}  # no end token is drawn
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "logit_bias": GO_ON}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    hosts = ("127.0.0.1", "localhost")
    with serving(limits=LIMITS, max_waiting=4, hosts=hosts) as made:
        yield made


def ask(
    server: Serving, body: Any, path: str = "/v1/chat/completions", method: str = "POST", **headers: str
) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of an answer."""
    asking = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        asking.request(method, path, raw, JSON | {name.replace("_", "-"): text for name, text in headers.items()})
        response = asking.getresponse()
        text = response.read()
        given = {name.lower(): value for name, value in response.getheaders()}
        is_json = given.get("content-type", "").startswith("application/json")
        return response.status, given, json.loads(text) if is_json else text.decode()
    finally:
        asking.close()


def head(path: str = "/v1/chat/completions", *lines: str) -> bytes:
    """What a request of JSON begins with."""
    given = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lines]
    return "\r\n".join([*given, "", ""]).encode()


def raw(server: Serving, text: bytes, *, leave: bool = False) -> bytes:
    """What comes back for bytes, until the server ends, or at once where the client does."""
    found = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as made, suppress(ConnectionError, OSError):
        made.sendall(text)  # the server may have hung up before it has read all
        if leave:
            made.shutdown(socket.SHUT_WR)
        while part := made.recv(65536):
            found += part
    return found


def streaming(server: Serving, **fields: Any) -> socket.socket:
    """A connection on which a stream has begun, and a token has come after the chunk that tells the role."""
    body = json.dumps(BODY | {"stream": True} | fields).encode()
    made = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    made.sendall(head("/v1/chat/completions", f"Content-Length: {len(body)}") + body)
    found = b""
    while found.count(b"data: ") < 2:
        part = made.recv(65536)
        assert part, "the server ended"
        found += part
    return made


def streaming_to_the_end(server: Serving, **fields: Any) -> str:
    return ask(server, BODY | {"stream": True} | fields)[2]


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/v1/nothing", "POST", 404), ("/v1/chat/completions", "GET", 405), ("/docs", "GET", 404),
     ("/openapi.json", "GET", 404), ("/v1/models/..%2f..%2fetc%2fpasswd", "GET", 404), ("/admin/load", "POST", 403)],
)  # fmt: skip
def test_errors_have_openais_shape(server: Serving, path: str, method: str, status: int):
    found, _, body = ask(server, {}, path, method)
    assert found == status and set(body["error"]) == {"message", "type", "param", "code"}


def test_bodies(server: Serving):
    assert ask(server, BODY)[0] == 200
    assert ask(server, b"{")[0] == 400
    assert ask(server, BODY | {"logprobs": 3})[0] == 400
    assert ask(server, BODY | {"functions": []})[0] == 422
    assert ask(server, BODY | {"user": "x" * 20_000})[0] == 413
    assert ask(server, BODY, Content_Type="text/plain")[0] == 415
    status, _, body = ask(server, BODY | {"model": "日本\n\x00"})
    assert status == 404 and "日本" in body["error"]["message"]


def test_json_that_is_none(server: Serving):
    for text in (b'{"max_tokens": 1e999}', b'{"seed": NaN}', b'{"user": "\\ud800"}', b'{"a":' + b"[" * 9000):
        status, _, body = ask(server, text)
        assert status == 400 and "not JSON" in body["error"]["message"]
    for arguments in ('{"a": "\\ud800"}', '{"a": 1e999}', '{"a": ' + "[" * 9000):
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        status, _, body = ask(server, BODY | {"messages": [{"role": "assistant", "tool_calls": [call]}]})
        assert (status, body["error"]["param"]) == (400, "messages[0].tool_calls[0].function")


def test_a_text_that_no_tokens_can_hold_is_refused_unread(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise AssertionError("it was read")

    with serving() as server:
        monkeypatch.setattr("vblackwell.serve.http.prepare.encode", fail)
        for fields in ({"messages": [{"role": "user", "content": "ab " * 50_000}]}, {"prompt": "ab " * 50_000}):
            path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
            status, _, body = ask(server, {"model": "tiny", "max_tokens": 1} | fields, path)
            assert status == 400 and body["error"]["code"] == "context_length_exceeded"


def test_a_body_in_chunks_is_counted(server: Serving):
    begin = head("/v1/completions", "Transfer-Encoding: chunked", "Connection: close")
    assert b" 413 " in raw(server, begin + b"5000\r\n" + b"x" * 0x5000 + b"\r\n0\r\n\r\n").partition(b"\r\n")[0]
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()
    answer = raw(server, begin + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
    assert b" 200 " in answer.partition(b"\r\n")[0]


def test_a_body_that_does_not_come(server: Serving):
    begin = head("/v1/completions", "Content-Length: 99") + b"{"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as made:
        made.sendall(begin)
        assert b" 408 " in made.recv(65536).partition(b"\r\n")[0]
    raw(server, begin, leave=True)  # and a client that leaves in the middle of it
    assert ask(server, BODY)[0] == 200


MALFORMED: list[bytes] = [
    *(b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n"),
    b"POST /v1/completions HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"x: " + b"y" * 1_000_000,
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
]


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: repr(text[:12]))
def test_malformed_http_hurts_nobody(server: Serving, text: bytes):
    answer = raw(server, text, leave=True)
    assert not answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 5"))
    assert ask(server, {}, "/health", "GET")[0] == 200


def test_a_page_of_another_site_does_not_reach_this_server(server: Serving):
    assert ask(server, {}, "/v1/models", "GET", Host="evil.example")[0] == 403
    for host in ("localhost", "127.0.0.1:8000", "LOCALHOST:1"):
        assert ask(server, {}, "/v1/models", "GET", Host=host)[0] == 200
    before = requests_counted(server, 403, "none")
    for path, method in (("/nothing", "GET"), ("/", "DELETE"), ("/v1/chat/completions/", "POST")):
        assert ask(server, {}, path, method, Host="evil.example")[0] == 403
    assert requests_counted(server, 403, "none") == before + 3


def test_a_body_that_is_compressed(server: Serving):
    assert ask(server, BODY, Content_Encoding="gzip")[0] == 415
    assert ask(server, BODY, Content_Encoding="identity")[0] == 200


def test_tokens_of_clients_that_leave_are_counted(server: Serving):
    def generated() -> int:
        return int(ask(server, {}, "/metrics", "GET")[2].partition('kind="generated"} ')[2].split()[0])

    before = generated()
    streaming(server, max_tokens=900, n=2).close()
    server.until_idle()
    assert generated() > before


def test_every_answer_is_counted(server: Serving):
    """Paths that a client makes up do not become labels."""
    before = [requests_counted(server, status, "none") for status in (404, 405)]
    assert ask(server, {}, "/made/up", "GET")[0] == 404
    assert ask(server, BODY, "/v1/chat/completions/")[0] == 404  # and no redirection by a name that the client says
    assert ask(server, {}, "/", "DELETE")[0] == 405
    after = [requests_counted(server, status, "none") for status in (404, 405)]
    assert after == [before[0] + 2, before[1] + 1]


# -- connections -------------------------------------------------------------------------------------------------------


def is_closed(made: socket.socket) -> bool:
    with suppress(ConnectionError):
        return made.recv(1) == b""
    return True


def test_headers_that_do_not_come(server: Serving, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.3)
    whole, begun = json.dumps(BODY).encode(), time.monotonic()
    for before, text in ((b"", b""), (b"", b"POST / HTTP/1.1\r\nHost: l"), (head("/health"), b"GET / HT")):
        with socket.create_connection(("127.0.0.1", server.port), timeout=4) as made:
            made.sendall(before.replace(b"POST", b"GET"))
            while before and b"ok" not in made.recv(65536):
                pass
            made.sendall(text)
            assert is_closed(made)
    assert time.monotonic() - begun < 4
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as made:  # a body has a time of its own
        made.sendall(head("/v1/chat/completions", f"Content-Length: {len(whole)}", "Connection: close"))
        time.sleep(0.35)
        made.sendall(whole)
        assert made.recv(12) == b"HTTP/1.1 200"


def test_more_connections_than_may_be_open_are_closed(
    server: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 4)
    with ExitStack() as cleanup:
        made = [
            cleanup.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=4)) for _ in range(8)
        ]
        made[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert made[0].recv(12) == b"HTTP/1.1 200"
        assert all(is_closed(each) for each in made[4:])
    begun = time.monotonic()
    while len(server.listener.server_state.connections) > 0:
        assert time.monotonic() - begun < 5
        time.sleep(0.01)
    assert ask(server, BODY)[0] == 200 and not caplog.records


# -- streams -----------------------------------------------------------------------------------------------------------


def test_a_stream_says_that_it_lives_while_nothing_comes(server: Serving):
    """Here a prompt of some hundred tokens takes longer than a hundredth of a second."""
    text = ask(server, BODY | {"stream": True, "messages": [{"role": "user", "content": "x" * 900}]})[2]
    assert ": still at it\n\n" in text.partition('"content":"')[2]
    lines = [line for line in text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith(("data: {", ": ")) for line in lines[:-1])
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"


def test_a_client_that_leaves_frees_its_pages(server: Serving):
    made = streaming(server, max_tokens=900)
    assert server.engine.state().pages_used > 0
    made.close()
    server.until_idle(10)
    assert server.engine.state().pages_used == 0


def test_a_client_that_leaves_before_the_answer_frees_its_pages(server: Serving):
    body = json.dumps(BODY | {"max_tokens": 900}).encode()
    steps = server.engine.state().steps
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as made:
        made.sendall(head("/v1/chat/completions", f"Content-Length: {len(body)}") + body)
        while server.engine.state().steps < steps + 3:
            time.sleep(0.01)
    server.until_idle(10)
    state = server.engine.state()
    assert state.pages_used == 0 and state.steps < steps + 800


def test_a_full_queue_answers_429_and_when_to_try_again(server: Serving):
    """More texts than may wait are asked for at once: some get 429, and none is lost."""
    found = list[tuple[int, dict[str, str], Any]]()
    threads = [
        threading.Thread(target=lambda: found.append(ask(server, BODY | {"n": 3, "max_tokens": 6}))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = [status for status, _, _ in found]
    assert set(statuses) == {200, 429}, statuses
    for status, headers, body in found:
        if status == 429:
            assert int(headers["retry-after"]) >= 1 and body["error"]["code"] == "queue_full"
        else:
            assert len(body["choices"]) == 3
    server.until_idle()


@pytest.mark.parametrize(("grace", "signals"), [(0.3, 1), (60.0, 2)])
def test_a_server_that_closes_says_so_to_whoever_is_cut_off(grace: float, signals: int):
    """When the time is over, or at once with a second signal of any kind."""
    found = list[tuple[int, dict[str, str], Any]]()
    with serving(grace_seconds=grace) as server, ThreadPoolExecutor() as pool:
        streams = [pool.submit(streaming_to_the_end, server, n=4, max_tokens=900) for _ in range(2)]
        whole = pool.submit(lambda: found.append(ask(server, BODY | {"n": 4, "max_tokens": 900})))
        while server.engine.state().models["tiny"].running < 12:
            time.sleep(0.01)
        for each in (signal.SIGINT, signal.SIGTERM)[:signals]:
            server.listener.handle_exit(each, None)
        begun = time.monotonic()
        for stream in streams:
            *_, error, end, rest = stream.result().split("\n\n")
            assert end.startswith("data: [DONE]") and "the server is closing" in error, (end, rest)
        whole.result()
        ((status, _, body),) = found
        assert status == 503 and body["error"]["type"] == "server_error"
        assert time.monotonic() - begun < 5


def test_what_is_written_while_a_server_closes_may_end():
    with serving() as server, ThreadPoolExecutor() as pool:
        stream = pool.submit(streaming_to_the_end, server, max_tokens=100)
        while not server.engine.state().models["tiny"].running:
            time.sleep(0.01)
        server.listener.handle_exit(signal.SIGINT, None)
        text = stream.result()
    assert "[DONE]" in text and '"finish_reason":"length"' in text and "error" not in text


def test_an_answer_that_takes_too_long_is_ended():
    with serving(limits=Limits(seconds=0.3)) as server:
        status, _, body = ask(server, BODY | {"max_tokens": 900})
        assert (status, body["error"]["code"]) == (408, "timeout")
        text = ask(server, BODY | {"max_tokens": 900, "stream": True})[2]
        events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        assert events[-1]["error"]["code"] == "timeout" and text.endswith("data: [DONE]\n\n")
        server.until_idle(10)


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_that_nobody_expected(
    server: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
):
    """The client gets an error object, metrics count it, and the log has it once."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(Reply, "pieces" if stream else "whole", fail)
    before = requests_counted(server, 500)
    status, _, body = ask(server, BODY | {"stream": stream})
    if stream:
        error, end = body.split("\n\n")[-3:-1]
        body = json.loads(error.removeprefix("data: "))
        assert (status, end) == (200, "data: [DONE]")
    else:
        assert status == 500 and requests_counted(server, 500) == before + 1
    assert body["error"]["type"] == "server_error" and "secret" not in body["error"]["message"]
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]
    monkeypatch.undo()
    assert ask(server, BODY)[0] == 200


def requests_counted(server: Serving, status: int, route: str = "/v1/chat/completions") -> int:
    text = ask(server, {}, "/metrics", "GET")[2]
    line = f'vb_requests_total{{route="{route}",status="{status}"}} '
    return next((int(each.removeprefix(line)) for each in text.splitlines() if each.startswith(line)), 0)


def test_a_request_that_fails_fails_alone(server: Serving, monkeypatch: pytest.MonkeyPatch):
    from vblackwell.serve.http.grammar import Grammar

    def fail(*_: object) -> None:
        raise VBError("the grammar is broken")

    monkeypatch.setattr(Grammar, "mask", fail)
    form = {"response_format": {"type": "json_object"}}
    status, _, body = ask(server, BODY | form)
    assert status == 500 and body["error"]["type"] == "server_error"
    assert '"error"' in ask(server, BODY | form | {"stream": True})[2]
    assert ask(server, BODY)[0] == 200


# -- keys, models, health ----------------------------------------------------------------------------------------------


def test_keys():
    with serving(api_keys=["first", "sécond"], admin_keys=["root"]) as server:
        for key in (None, "", "firs", "first2", "Basic first"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            for path, method in (("/v1/models", "GET"), ("/v1/completions", "POST"), ("/metrics", "GET")):
                status, given, body = ask(server, BODY, path, method, **headers)
                assert status == 401 and given["www-authenticate"] == "Bearer"
                assert body["error"]["type"] == "authentication_error"
        assert ask(server, {}, "/v1/models", "GET", Authorization="bearer first")[0] == 200
        assert ask(server, {}, "/v1/models", "GET", Authorization="Bearer root")[0] == 200
        second = "sécond".encode().decode("latin-1")  # its bytes in UTF-8, as http.client takes them
        assert ask(server, {}, "/v1/models", "GET", Authorization=f"Bearer {second}")[0] == 200
        assert ask(server, {}, "/health", "GET")[0] == 200 and ask(server, {}, "/", "GET")[0] == 200
        load: Any = {"model": "tiny"}
        assert ask(server, load, "/admin/unload", Authorization="Bearer first")[0] == 401
        status, _, body = ask(server, load, "/admin/unload", Authorization="Bearer root")
        assert (status, body["state"]) == (200, "asleep")
        assert ask(server, load, "/admin/load", Authorization="Bearer root")[2]["state"] == "awake"
        assert ask(server, {"model": "x"}, "/admin/load", Authorization="Bearer root")[0] == 404


def test_metrics_count(server: Serving):
    def metrics() -> dict[str, float]:
        text = ask(server, {}, "/metrics", "GET")[2]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}

    before = metrics()
    assert ask(server, BODY)[0] == 200
    after = metrics()
    for name, more in (
        ('vb_requests_total{route="/v1/chat/completions",status="200"}', 1),
        ('vb_tokens_total{kind="generated"}', 4),
        ("vb_first_token_seconds_count", 1),
    ):
        assert after[name] - before.get(name, 0) == more
    assert after['vb_model_state{model="tiny",state="awake"}'] == 1


def test_health_ends_with_the_engine():
    with serving() as server:
        assert ask(server, {}, "/health", "GET")[0] == 200
        server.engine.close()
        assert ask(server, {}, "/health", "GET")[0] == 503
        assert ask(server, BODY)[0] == 503


def test_the_page_needs_nothing_from_elsewhere(server: Serving):
    status, headers, text = ask(server, {}, "/", "GET")
    assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
    assert "http://" not in text and "https://" not in text and "src=" not in text and "innerHTML" not in text
    assert "text.value = content" in text and "begins anew" in text  # after an error


# -- any body ----------------------------------------------------------------------------------------------------------

NUMBERS: list[Any] = [0, 1, -1, 2, 3.5, 1e308, 1e999, -(1 << 70), 1 << 70, True, False, None]
TEXTS = ["", "x", "tiny", "user", "é\u0000", "\ud800", "auto", "required", "none", "json_object", "text", "a" * 300]


def anything(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 3 else 4)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(TEXTS)
    if kind == 4:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {
        rng.choice([*TEXTS, "type", "function", "schema", "role", "content"]): anything(rng, depth + 1)
        for _ in range(3)
    }


def good(rng: random.Random, path: str) -> dict[str, Any]:
    """A body, each of whose fields may be right, most often of those that ``path`` has."""
    choices: dict[str, list[Any]] = {
        "n": [1, 2], "max_tokens": [1, 3], "temperature": [0, 1.0, 2], "top_p": [0, 0.5, 1], "top_k": [0, 5],
        "min_p": [0, 0.9], "seed": [0, -5, 1 << 62], "presence_penalty": [-2, 2], "frequency_penalty": [-2, 2],
        "repetition_penalty": [0.5, 2], "logit_bias": [{"5": 100}, {"256": 100}] * 3 + [{"9999": 1}],
        "stop": ["a", ["b", "cd"]], "logprobs": [True, 1, 0], "top_logprobs": [0, 20], "stream": [True, False],
        "stream_options": [{"include_usage": True}], "echo": [True], "user": ["me"],
        "response_format": [{"type": "json_object"}],
        "tools": [[{"type": "function", "function": {"name": "f"}}]],
        "tool_choice": ["auto", "none", "required"],
        "chat_template_kwargs": [{}] * 5 + [{"x": 1}], "model": ["tiny"] * 5 + ["none"],
        "input": ["hi", [1, 2], ["a", [3]]], "encoding_format": ["float", "base64"], "dimensions": [1, 8],
    }  # fmt: skip
    known = {
        "/v1/chat/completions": CHAT_FIELDS,
        "/v1/completions": COMPLETION_FIELDS,
        "/v1/embeddings": EMBEDDING_FIELDS,
    }.get(path, set(choices))
    others = rng.random() < 0.7
    names = [name for name in choices if (name in known or others) and rng.random() < 0.3]
    made = (
        {"model": "tiny"}
        | ({} if path == "/v1/embeddings" else {"max_tokens": 2})
        | {name: rng.choice(choices[name]) for name in names}
    )
    if not others:  # what belongs together
        made |= {"stream": True} if "stream_options" in made else {}
        made |= {"logprobs": True} if "top_logprobs" in made else {}
        made |= {"logprobs": 3} if "logprobs" in made and path == "/v1/completions" else {}
        made |= {"logprobs": True} if "logprobs" in made and path == "/v1/chat/completions" else {}
        made |= {"tools": choices["tools"][0]} if made.get("tool_choice") == "required" else {}
    return made


def body(rng: random.Random, path: str) -> bytes:
    """JSON that may be right, with some of it changed, or bytes with some of them changed."""
    made = good(rng, path)
    if rng.random() < (0.1 if path == "/v1/completions" else 0.9):
        made["messages"] = [{"role": "user", "content": "hi"}] * rng.randrange(1, 3)
    if rng.random() < (0.1 if path == "/v1/chat/completions" else 0.9):
        made["prompt"] = rng.choice(["hi", [1, 2], ["a", [3]], ""])
    for _ in range(rng.choice([0, 0, 1, 2])):
        made[rng.choice([*made, "new", "messages", "prompt"])] = anything(rng)
    text = json.dumps(made).replace("Infinity", "1e999").encode()
    if rng.random() < 0.2:
        place = rng.randrange(len(text))
        text = text[:place] + rng.randbytes(rng.randrange(4)) + text[place + rng.randrange(8) :]
    return text


def fuzz(server: Serving, count: int, seed: int) -> list[int]:
    """The statuses of so many bodies; the engine lives, and no page is kept."""
    rng, statuses = random.Random(seed), list[int]()
    for number in range(count):
        path = rng.choice(["/v1/chat/completions", "/v1/completions"] * 4 + ["/v1/embeddings", "/admin/load"])
        raw_body = body(rng, path)
        status, _, answer = ask(server, raw_body, path)
        statuses.append(status)
        assert status < 500, (seed, number, raw_body, answer)
        assert status != 200 or path != "/v1/embeddings"
    server.until_idle()
    state = server.engine.state()
    assert state.alive and state.pages_used == 0
    return statuses


def test_no_body_makes_the_server_fail(server: Serving):
    statuses = fuzz(server, 400, seed=1)
    assert {200, 400, 404, 422} <= set(statuses)
    assert ask(server, BODY)[0] == 200


@pytest.mark.slow
def test_no_body_of_ten_thousand_makes_the_server_fail():
    import psutil

    process = psutil.Process()
    with serving(limits=LIMITS) as server:
        fuzz(server, 2000, seed=2)
        held = process.memory_info().rss
        fuzz(server, 8000, seed=3)
        grown = process.memory_info().rss - held
        assert grown < 32 << 20, f"{grown / 1e6:.1f} MB more than after 2,000 bodies"
        assert ask(server, BODY)[0] == 200
