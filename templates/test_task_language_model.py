"""The task: windows lose no byte, the network reads them in order, padding is free."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def network(module):
    """Logits of new parameters for tokens [batch, 16], and the loss and gradients of a batch."""
    model, task = module("model"), module("task")
    config = dataclasses.replace(model.TINY, depth=1)
    inputs = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    made = model.create_model(config, inputs, 256, jnp.float32)
    variables = made.init(jax.random.key(0))

    def logits(tokens):
        return made.apply(variables, jnp.asarray(tokens), train=False)[0]

    @jax.value_and_grad
    def loss(params, batch):
        changed = variables | {"params": params}
        outputs, _ = made.apply(changed, task.model_inputs(batch), train=False)
        total, weight = task.loss_and_metrics(outputs, batch)["loss"]
        return total / weight

    return logits, lambda batch: loss(variables["params"], batch)


def text(seed=0):
    return np.random.default_rng(seed).integers(97, 123, (1, 16))


def test_no_token_sees_a_later_one(network):
    logits, _ = network
    tokens, changed = text(), text()
    changed[0, 9] += 1
    before, after = logits(tokens)[0], logits(changed)[0]
    np.testing.assert_allclose(after[:9], before[:9], atol=1e-6)
    assert all(abs(after[9:] - before[9:]).max(axis=1) > 1e-4)


def test_the_order_of_earlier_tokens_matters(network):
    # In one block of attention only the positions can tell: the set of tokens is the same.
    logits, _ = network
    tokens, swapped = text(), text()
    swapped[0, [2, 3]] = tokens[0, [3, 2]]
    assert abs(logits(tokens)[0, -1] - logits(swapped)[0, -1]).max() > 1e-4


def test_padding_changes_neither_loss_nor_gradients(network):
    _, loss = network
    tokens = np.concatenate([text(), text(1)[:, :1]], axis=1).astype(np.uint8)
    mask = np.repeat([[1, 0]], [10, 6], axis=1).astype(np.float32)
    padded = tokens.copy()
    padded[:, 11:] = 0
    results = [loss({"tokens": x, "mask": mask}) for x in (tokens, padded)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *results)
    padded[:, 10] = 0  # the last target that counts
    assert loss({"tokens": padded, "mask": mask})[0] != results[0][0]


@pytest.mark.parametrize("context", [1, 5, 16, 1000])
def test_every_byte_is_predicted_once(module, context):
    texts = [np.frombuffer(x, np.uint8) for x in (b"a", b"hello world", bytes(range(1, 100)))]
    split = module("data").Split(texts, context)
    batch = split.rows(np.arange(len(split)))
    assert batch["tokens"].shape == (len(split), context + 1)
    targets = batch["tokens"][:, 1:][batch["mask"] == 1]
    assert targets.tobytes() == b"".join(x.tobytes() + b"\0" for x in texts)
    shifted = batch["tokens"][:, :-1][batch["mask"] == 1]
    assert shifted.tobytes() == b"".join(b"\0" + x.tobytes() for x in texts)


def test_metrics_are_those_of_numpy(module):
    task = module("task")
    logits = np.random.default_rng(0).normal(size=(3, 4, 256)).astype(np.float32)
    tokens = np.random.default_rng(1).integers(0, 256, (3, 5)).astype(np.uint8)
    mask = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], np.float32)
    totals = task.loss_and_metrics(logits, {"tokens": tokens, "mask": mask})
    scores = task.report({name: (float(s), float(w)) for name, (s, w) in totals.items()})
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    wanted = [p[i, j, tokens[i, j + 1]] for i, j in zip(*np.nonzero(mask), strict=True)]
    assert scores["bits_per_byte"] == pytest.approx(-np.log2(wanted).mean(), rel=1e-5)
    assert scores["perplexity"] == pytest.approx(2 ** scores["bits_per_byte"], rel=1e-5)
    assert (scores["num_tokens"], scores["num_examples"]) == (5, 2)


@pytest.fixture
def load(module):
    """Load the text at a path, with windows of 16 bytes."""
    config, data = module("config"), module("data")

    def load(path):
        settings = config.DataConfig(source="path", path=str(path))
        return data.load(config.Config(data=settings, model=module("model").TINY))

    return load


def contents(split):
    return [x.tobytes().decode() for x in split.texts]


def test_whole_files_are_held_out(load, tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(f"text {i}")
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("not this")
    data = load(tmp_path)
    assert contents(data.test) == ["text 0", "text 20"]
    assert contents(data.validation) == ["text 10", "text 30"]
    parts = contents(data.train) + contents(data.validation) + contents(data.test)
    assert sorted(parts) == sorted(f"text {i}" for i in range(40))
    assert load(tmp_path / "*.txt").fingerprint == data.fingerprint
    (tmp_path / "07.txt").write_text("text x")
    assert load(tmp_path).fingerprint != data.fingerprint


def test_of_a_single_file_the_end_is_held_out(load, module, tmp_path, monkeypatch):
    file = tmp_path / "book.txt"
    file.write_text("".join(chr(97 + i % 26) for i in range(100)))
    data = load(file)
    parts = [contents(split)[0] for split in (data.train, data.validation, data.test)]
    assert [len(part) for part in parts] == [90, 5, 5]
    assert "".join(parts) == file.read_text()
    monkeypatch.setattr(module("data"), "LARGE", 10)
    mapped = load(file)
    assert isinstance(mapped.train.texts[0], np.memmap)
    assert mapped.fingerprint == data.fingerprint
    rows = np.arange(len(data.train))
    jax.tree.map(np.testing.assert_array_equal, mapped.train.rows(rows), data.train.rows(rows))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("absent.txt", None, ["absent.txt", "a text file, a directory or a glob"]),
        ("*.md", None, ["*.md", "glob"]),
        ("empty.txt", b"", ["empty.txt", "not empty"]),
        ("image.png", b"\x89PNG\r\n\x00\x00" * 9, ["image.png", "not text", "/**/*.txt"]),
        ("short.txt", b"abc", ["3 bytes", "too little"]),
    ],
)
def test_what_is_not_text_is_refused(load, module, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(module("config").SettingError) as error:
        load(tmp_path / name)
    assert all(word in str(error.value) for word in words)
