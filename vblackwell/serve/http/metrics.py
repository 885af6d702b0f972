"""Counters of a server, in Prometheus' text format, version 0.0.4."""

from collections import Counter
from collections.abc import Collection, Iterator
from threading import Lock

from vblackwell.serve.request import Done, EngineState

FIRST_TOKEN_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # upper ends of the histogram
Labels = tuple[tuple[str, object], ...]


class Metrics:
    """What was answered; what the engine does is asked of it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._requests, self._tokens = Counter[tuple[str, int]](), Counter[str]()
        self._first, self._first_sum = [0] * (len(FIRST_TOKEN_SECONDS) + 1), 0.0

    def answered(self, route: str, status: int) -> None:
        """A request got its status."""
        self._requests[route, status] += 1

    def first_token(self, seconds: float) -> None:
        """The first new token of a request came after so many seconds."""
        self._first[sum(bound < seconds for bound in FIRST_TOKEN_SECONDS)] += 1
        self._first_sum += seconds

    def count(self, done: Done) -> None:
        """A text has ended. In any thread."""
        with self._lock:
            self._tokens += Counter(prompt=done.prompt_tokens, cached=done.cached_tokens, generated=done.new_tokens)

    def lines(self, state: EngineState) -> Iterator[str]:
        """All of it."""
        requests = [((("route", route), ("status", code)), n) for (route, code), n in sorted(self._requests.items())]
        yield from _metric("requests_total", "counter", requests)
        with self._lock:
            tokens = [((("kind", kind),), self._tokens[kind]) for kind in ("prompt", "cached", "generated")]
        yield from _metric("tokens_total", "counter", tokens)
        yield from _metric("steps_total", "counter", [((), state.steps)])
        for name in ("running", "waiting"):
            texts = [((("model", model),), getattr(each, name)) for model, each in state.models.items()]
            yield from _metric(f"texts_{name}", "gauge", texts)
        states = [((("model", model), ("state", each.state)), 1) for model, each in state.models.items()]
        yield from _metric("model_state", "gauge", states)
        for name in ("pages_used", "pages_total", "pages_sunk", "pages_sunk_total"):
            yield from _metric(name, "gauge", [((), getattr(state, name))])
        yield "# TYPE vb_first_token_seconds histogram"
        total = 0
        for bound, count in zip((*FIRST_TOKEN_SECONDS, "+Inf"), self._first, strict=True):
            total += count
            yield f'vb_first_token_seconds_bucket{{le="{bound}"}} {total}'
        yield f"vb_first_token_seconds_sum {self._first_sum}"
        yield f"vb_first_token_seconds_count {total}"


def _metric(name: str, kind: str, values: Collection[tuple[Labels, float]]) -> Iterator[str]:
    yield f"# TYPE vb_{name} {kind}"
    for labels, value in values:
        quoted = ",".join(f'{key}="{_escaped(str(label))}"' for key, label in labels)
        yield f"vb_{name}{{{quoted}}} {value}" if quoted else f"vb_{name} {value}"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
