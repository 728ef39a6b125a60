"""A user's own text: what only whole runs, several processes or optional packages can show."""

import gzip
import json

import numpy as np
import pyarrow
import pytest
from children import (
    TEXT,
    TEXT_NNX,
    end_with,
    flags,
    one_message,
    read_state,
    result_of,
    start_two,
    train,
)
from pyarrow import parquet

pytestmark = pytest.mark.slow


def write_records(folder):
    """The same texts as files and as records of each form; returns the places."""
    draw = np.random.default_rng(0)
    words = ["to be ", "or ", "not to be\n", "that is the question "]
    texts = ["".join(draw.choice(words, size)) for size in draw.integers(5, 60, 80)]
    (folder / "files").mkdir()
    for number, text in enumerate(texts):
        (folder / "files" / f"{number}.txt").write_text(text, newline="")
    lines = "".join(json.dumps({"body": text}) + "\n" for text in texts).encode()
    (folder / "all.jsonl").write_bytes(lines)
    (folder / "all.jsonl.gz").write_bytes(gzip.compress(lines))
    parquet.write_table(pyarrow.table({"body": texts}), folder / "all.parquet", row_group_size=9)
    return [folder / name for name in ("files", "all.jsonl", "all.jsonl.gz", "all.parquet")]


@pytest.mark.parametrize("package", [TEXT, TEXT_NNX])
def test_the_same_text_in_every_form_trains_the_same(server, tmp_path, package):
    results = []
    for number, place in enumerate(write_records(tmp_path)):
        changes = {"data__path": place, "data__field": "body", "total_steps": 6}
        words = flags(server, package, workdir=tmp_path / str(number), **changes)
        server.start(train, *words, package=package).ends_with(0)
        state = server.start(read_state, tmp_path / str(number), package=package).answer()
        results.append((result_of(tmp_path / str(number))["eval"], state))
    assert results[1:] == results[:1] * 3


def test_two_processes_convert_at_once_and_resume_exactly(server, tmp_path):
    place, states = write_records(tmp_path)[1], []
    for name, *stops in (("whole", {}), ("parts", {"stop_after_step": 5}, {})):
        for more in stops:
            changes = {"data__path": place, "data__field": "body"} | more
            words = flags(server, TEXT, workdir=tmp_path / name, **changes)
            end_with(start_two(server, train, *words, package=TEXT), 75 if more else 0)
        states.append(server.start(read_state, tmp_path / name, package=TEXT).answer())
    assert states[0] == states[1]


@pytest.mark.parametrize("package", [TEXT, TEXT_NNX])
def test_tokens_train_resume_and_have_no_bits_per_byte(server, tmp_path, package):
    draw = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for name, size in (("train", 4000), ("val", 1000)):
        draw.choice([300, 7, 7, 999], size).astype("<u2").tofile(tmp_path / "data" / f"{name}.bin")
    states = []
    for name, *stops in (("whole", {}), ("parts", {"stop_after_step": 5}, {})):
        for more in stops:
            changes = {"data__path": tmp_path / "data", "data__vocab_size": 1000} | more
            words = flags(server, package, workdir=tmp_path / name, **changes)
            server.start(train, *words, package=package).ends_with(75 if more else 0)
        states.append(server.start(read_state, tmp_path / name, package=package).answer())
    assert states[0] == states[1]
    scores = result_of(tmp_path / "whole")["eval"]
    assert scores["perplexity"] < 100 and "bits_per_byte" not in scores
    assert scores["num_tokens"] == 31 * 16
    log = (tmp_path / "whole" / "train.log").read_text()
    assert "tokens of a vocabulary of 1,000" in log and "second for the test" in log
    words = flags(server, package, workdir=tmp_path / "new", data__path=tmp_path / "data")
    text = server.start(train, *words, package=package).ends_with(2)
    one_message(text, "has tokens: give --data.vocab-size")
