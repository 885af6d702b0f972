"""Tokenizer and packed tokens: the same files give the same tokens, from the cache or not, alone or with others."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from tests.waiting import wait_until
from vblackwell.data import corpus as data
from vblackwell.data import tokenizer
from vblackwell.data.corpus import PackedDataset, prepare_data
from vblackwell.data.documents import find_text
from vblackwell.data.tokenizer import train_tokenizer
from vblackwell.errors import ConfigurationError, DiskError, VBError
from vblackwell.machine.cache import cache_root
from vblackwell.train.progress import Stopped, StopRequest

LINES = [
    "def first(x):",
    "    return x + 1",
    "",
    "class Größe:  # <|endoftext|> in a document",
    "    pass",
    "print('日本語 😀')",
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vblackwell"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "data"
    path.mkdir()
    (path / "a.txt").write_text("\n".join(LINES * 30))
    (path / "b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    return path


def documents_of(corpus):
    """The documents, decoded from the packed tokens."""
    ends = np.flatnonzero(corpus.tokens == corpus.end_of_text_id)
    pieces = np.split(np.asarray(corpus.tokens), ends + 1)
    assert len(pieces[-1]) == 0  # the last token ends a document
    return [corpus.tokenizer.decode(piece[:-1].tolist(), skip_special_tokens=False) for piece in pieces[:-1]]


def test_tokens_are_the_documents(folder):
    corpus = prepare_data(folder, None, 300)
    # an empty line of jsonl is an empty document, and has nothing to learn from
    assert sorted(documents_of(corpus)) == sorted(["\n".join(LINES * 30), *(line for line in LINES if line)])
    assert corpus.vocab_size == corpus.tokenizer.get_vocab_size() == 300
    assert corpus.tokens.dtype == np.uint16 and not corpus.tokens.flags.writeable


def test_second_call_reads_the_cache(folder, cache, monkeypatch):
    first, said = prepare_data(folder, None, 300), []
    monkeypatch.setattr("vblackwell.data.corpus.train_tokenizer", lambda *_: pytest.fail("trained again"))
    second = prepare_data(folder, None, 300, lambda message, share: said.append((message, share)))
    assert second.fingerprint == first.fingerprint and np.array_equal(second.tokens, first.tokens)
    assert not any("packing" in message for message, _ in said)
    assert all(share is None or 0 <= share <= 1 for _, share in said) and said[-1][1] == 1
    assert not list(cache.rglob("*.tmp"))


def test_changed_text_or_tokenizer_is_another_corpus(folder):
    first = prepare_data(folder, None, 300)
    assert prepare_data(folder, None, 290).fingerprint != first.fingerprint
    (folder / "a.txt").write_text("\n".join(LINES * 30).replace("first", "third"))
    changed = prepare_data(folder, None, 300)
    assert changed.fingerprint != first.fingerprint and any("third" in text for text in documents_of(changed))


@pytest.mark.parametrize("name", ["tokens.bin", "tokenizer.json"])
def test_a_damaged_cache_is_built_again(folder, cache, name):
    first = np.array(prepare_data(folder, None, 300).tokens)
    (path,) = cache.rglob(name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x04
    path.write_bytes(data[:-3] if name == "tokenizer.json" else data)
    said = []
    again = prepare_data(folder, None, 300, lambda message, share: said.append(message))
    assert np.array_equal(again.tokens, first) and any("again" in message for message in said)


def test_no_digit_of_a_cached_tokenizer_changes_unseen(folder, cache):
    """A token with another number is still a tokenizer; a model with it fails, or learns something else."""
    first, said = prepare_data(folder, None, 300), []
    (path,) = cache.rglob("tokenizer.json")
    text = path.read_text()
    for old, new in (('": 299', '": 899'), ('": 290', '": 280'), ('": 33,', '": 34,')):
        assert old in text
        path.write_text(text.replace(old, new, 1))
        said.clear()
        again = prepare_data(folder, None, 300, lambda message, share: said.append(message))
        assert again.fingerprint == first.fingerprint and again.tokenizer.to_str() == first.tokenizer.to_str()
        assert any("training the tokenizer again" in message for message in said) and path.read_text() == text


AT_ONCE = """
import multiprocessing
import numpy as np
from pathlib import Path
from vblackwell.data.corpus import prepare_data
from vblackwell.data.corpus import PackedDataset

def prepare(start):
    start.wait()
    corpus = prepare_data(Path(sys.argv[1]), None, 300)
    print(corpus.fingerprint, int(np.asarray(corpus.tokens, dtype=np.int64).sum()), flush=True)

context = multiprocessing.get_context("fork")
start = context.Barrier(3)
workers = [context.Process(target=prepare, args=(start,)) for _ in range(3)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
assert [worker.exitcode for worker in workers] == [0, 0, 0]
"""


def test_processes_that_build_the_same_entry_agree(folder, cache, program):
    said = program(AT_ONCE, str(folder), XDG_CACHE_HOME=str(cache.parent)).splitlines()
    assert len(said) == 3 and len(set(said)) == 1 and not list(cache.rglob("*.tmp"))
    assert len(list((cache / "tokens").iterdir())) == len(list((cache / "tokenizers").iterdir())) == 1


def test_a_kill_while_building_leaves_no_entry(cache, program):
    text = (
        "import os, signal; from vblackwell.data.corpus import cached\n"
        "def build(folder):\n"
        "    folder.add('half', b'half'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "cached('things', 'key', build, print, 'again')"
    )
    program(text, code=-signal.SIGKILL, XDG_CACHE_HOME=str(cache.parent))
    assert len(list((cache / "things").glob("key-manifest.*.tmp"))) == 1
    made = data.cached("things", "key", lambda folder: folder.add("whole", b"whole"), print, "again")
    assert {path.name for path in made.iterdir()} == {"whole", "manifest.json"} and list(
        (cache / "things").iterdir()
    ) == [made]


def test_tokenizer_is_the_same_for_the_same_text(folder):
    source = find_text(folder)
    assert train_tokenizer(source, 320).to_str() == train_tokenizer(source, 320).to_str()


def test_a_tokenizer_trained_in_its_own_process_is_the_one_trained_here(folder):
    source = find_text(folder)
    assert train_tokenizer(source, 320).to_str() == tokenizer._train(tokenizer._sample(source), 320).to_str()


def test_a_tokenizer_s_process_may_be_slow_to_read(folder, monkeypatch):
    """It gets all of a text that no pipe holds, however often was waited before it has started."""
    monkeypatch.setattr(tokenizer, "HEARD_S", 0.001)
    (folder / "long.txt").write_text("more than a pipe holds " * 10_000)
    source = find_text(folder)
    assert train_tokenizer(source, 320).to_str() == tokenizer._train(tokenizer._sample(source), 320).to_str()


def test_a_tokenizer_s_process_that_fails_is_named(folder, cache, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    (folder / "long.txt").write_text("more than a pipe holds " * 100_000)
    with pytest.raises(VBError, match="trains the tokenizer ended with exit code 1: no message; give --tokenizer"):
        prepare_data(folder)
    assert not list((cache / "tokenizers").iterdir())


def test_a_tokenizer_s_process_ends_with_its_parent():
    """Here a shell, which is killed."""
    training = [sys.executable, "-m", "vblackwell.data.tokenizer", "300"]
    shell = f"exec 3<&0; {shlex.join(training)} $$ <&3 & echo $!; wait"  # without a terminal's input it would read none
    with subprocess.Popen(["sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        trains = Path("/proc", process.stdout.readline().strip())
        wait_until(lambda: len(list((trains / "task").iterdir())) > 1)  # it watches, and waits for texts
        process.kill()
        wait_until(lambda: not (trains / "exe").exists())  # nor has a zombie one
        process.stdin.close()


def test_given_tokenizer_is_used(folder, tmp_path):
    trained = prepare_data(folder, None, 300)
    model = tmp_path / "model"
    model.mkdir()
    trained.tokenizer.save(str(model / "tokenizer.json"))
    for path in (model, model / "tokenizer.json"):
        corpus = prepare_data(folder, path)
        assert np.array_equal(corpus.tokens, trained.tokens) and corpus.end_of_text_id == 0
    word = trained.tokenizer.encode("return").ids[0]
    (model / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": trained.tokenizer.id_to_token(word)}})
    )
    assert prepare_data(folder, model).end_of_text_id == word


def test_tokenizer_without_an_end_says_so(folder, tmp_path):
    letters = {chr(code): code + 70_000 for code in range(128)}  # numbers with a hole, beyond 16 bits
    Tokenizer(models.BPE(vocab=letters, merges=[])).save(str(tmp_path / "tokenizer.json"))
    said = []
    corpus = prepare_data(folder, tmp_path / "tokenizer.json", progress=lambda message, share: said.append(message))
    assert corpus.vocab_size == 70_128 and corpus.tokens.dtype == np.uint32 and corpus.tokens.min() >= 70_000
    assert corpus.end_of_text_id is None and any("no end-of-text token" in message for message in said)


def test_bad_tokenizers_are_refused(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json is not one"):
        prepare_data(folder, tmp_path)
    with pytest.raises(ConfigurationError, match="there is no file"):
        prepare_data(folder, tmp_path / "gone")
    with pytest.raises(ConfigurationError, match="at least 257"):
        prepare_data(folder, None, 256)


@pytest.mark.parametrize("content", ["", '{"text": ""}\n\n'])
def test_an_empty_corpus_is_refused_and_leaves_nothing(tmp_path, cache, content):
    path = tmp_path / ("empty.jsonl" if content else "empty.txt")
    path.write_text(content)
    with pytest.raises(ConfigurationError, match="holds no text"):
        prepare_data(path, None, 300)
    assert not list((cache / "tokens").iterdir()) and not list(cache.rglob("*.tmp"))


def test_text_that_becomes_no_tokens_is_refused(tmp_path, cache):
    path, tokens = tmp_path / "blank.txt", tmp_path / "tokenizer.json"
    path.write_text("some text " * 100)
    Tokenizer(models.BPE({"q": 0}, [])).save(str(tokens))
    with pytest.raises(ConfigurationError, match="becomes no tokens"):
        prepare_data(path, tokens)
    assert not list((cache / "tokens").iterdir()) and not list(cache.rglob("*.tmp"))


def test_a_cache_that_cannot_be_written_names_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DiskError, match="XDG_CACHE_HOME"):
        data.cached("things", "key", lambda folder: None, print, "again")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == Path.home() / ".cache" / "vblackwell"


@pytest.mark.parametrize("phase", ["reading", "training a tokenizer", "packing tokens"])
def test_a_stop_is_met_while_data_is_read(phase, folder, cache, monkeypatch):
    """In the phase, not after it, and nothing is left in the cache. Of 30 batches no second one is begun."""
    text = "def f(x):\n    return x\n" * 1000
    for number in range(30):
        (folder / f"more{number}.py").write_text(text)
    monkeypatch.setattr(data, "BATCH_BYTES", len(text))
    begun, batches = [], data._batches
    monkeypatch.setattr(data, "_batches", lambda source: (begun.append(1) or batch for batch in batches(source)))

    def report(message, share):
        if message.startswith(phase):
            os.kill(os.getpid(), signal.SIGTERM)

    with StopRequest() as stop, pytest.raises(Stopped), stop.interrupting():
        prepare_data(folder, vocab_size=300, progress=report)
    assert stop.exit_code == 143 and len(begun) == (phase == "packing tokens")
    kinds = {path.name for path in cache.iterdir()} if cache.exists() else set()
    assert not [
        path for kind in kinds for path in (cache / kind).iterdir() if kind == "tokens" or path.suffix == ".tmp"
    ]


# -- what is held out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[7], [3, 3], [1, 0, 500, 2], [5] * 1000, [1000, *[3] * 300, 900], [0, 4, 0]])
def test_every_token_is_packed_once_and_drawn_documents_last(lengths):
    ends = np.cumsum(lengths)
    found = list(data.stretches(ends))
    assert sorted(token for start, stop in found for token in range(start, stop)) == list(range(ends[-1]))
    starts = {int(end - length): int(end) for length, end in zip(lengths, ends, strict=True) if length}
    held = wanted = max(1, int(ends[-1] * 0.02))
    while held > 0:  # whole documents, from the last token back; the one at the border may be held out in part
        start, stop = found.pop()
        assert start == stop or starts[start] == stop
        held -= stop - start
    rest = [token for start, stop in found for token in range(start, stop)]
    assert rest == sorted(rest) and wanted


def test_documents_that_are_held_out_are_from_all_of_the_corpus(tmp_path):
    """And the same ones for every sequence length and seed: validation losses can be compared."""
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {number} of these"}) + "\n" for number in range(1000)))
    corpus = prepare_data(path, None, 300)
    splits = [PackedDataset(corpus, 16, split, seed=3).tokens for split in ("train", "validation")]
    trained, held = (
        set(re.findall(r"document (\d+) of these", corpus.tokenizer.decode(part.tolist()))) for part in splits
    )
    numbers = sorted(map(int, held))
    assert not trained & held and len(trained | held) >= 999 and 15 <= len(held) <= 25
    assert numbers[0] < 200 and numbers[-1] > 800 and max(np.diff(numbers)) < 300
    assert np.array_equal(PackedDataset(corpus, 8, "validation", seed=4).tokens, splits[1])
