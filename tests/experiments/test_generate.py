"""Sampling from the command line: every prompt answered, the same again by the same seed."""

import dataclasses
import json
import operator
import sys

import jax
import numpy as np
import pytest

from experiments import generate
from rljax import models
from rljax.data import load_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny mixture with a tokenizer in which each byte is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    config = dataclasses.replace(models.PRESETS["tiny-moe"](), vocab_size=257)
    models.save_pretrained(path, config, models.init(jax.random.key(0), config))
    tokenizer.save(str(path / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    (path / "questions.jsonl").write_text(
        "".join(json.dumps({"prompt": p}) + "\n" for p in ("one", "and two", "ü"))
    )
    return path


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["generate", *arguments])
    # The command runs alone, on one device; here it shares a process.
    monkeypatch.setattr(jax, "devices", lambda *_, all=jax.devices: all()[:1])
    return generate.main()


def test_every_prompt_is_answered_in_lines_of_json(model, tmp_path, monkeypatch, capsys):
    flags = [
        f"--model={model}", f"--prompts={model}/questions.jsonl", "--num_generations=2",
        "--max_tokens=9", "--top_p=0.9", "--seed=3", "--slots=8", "--temperature=0.8",
    ]  # fmt: skip
    lines = []
    for name, more in (("a", []), ("b", []), ("c", ["--kernels=off"])):
        assert run(monkeypatch, *flags, *more, f"--out={tmp_path}/{name}.jsonl") == 0
        text = (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8")
        lines.append([json.loads(line) for line in text.splitlines()])
    assert lines[0] == lines[1]
    key = operator.itemgetter("prompt_index", "sample_index")
    for native, plain in zip(*(sorted(part, key=key) for part in lines[1:]), strict=True):
        assert native["tokens"] == plain["tokens"]
        np.testing.assert_allclose(native["logp"], plain["logp"], atol=1e-4)
    summary = json.loads(capsys.readouterr().out.splitlines()[0])
    assert summary["responses"] == 6 and summary["out"] == f"{tmp_path}/a.jsonl"
    assert summary["tokens"] == sum(len(line["tokens"]) for line in lines[0])
    tokenizer = load_tokenizer(model)
    places = {(line["prompt_index"], line["sample_index"]) for line in lines[0]}
    assert places == {(i, k) for i in range(3) for k in range(2)}
    for line in lines[0]:
        assert line["prompt"] == ("one", "and two", "ü")[line["prompt_index"]]
        assert line["text"] == tokenizer.decode(line["tokens"])
        assert np.isfinite(line["logp"]) and line["logp"] < 0
        ended = line["tokens"][-1] in tokenizer.end_ids
        assert line["finish_reason"] == ("stop" if ended else "length")
        assert ended or len(line["tokens"]) == 9


@pytest.mark.parametrize(
    "flags,complaint",
    [
        (["--temprature=1"], "flag --temprature is unknown; did you mean --temperature?"),
        (["--prompts=nope.jsonl"], "'nope.jsonl' is neither a file, a folder nor"),
        (["--model=nope"], "tokenizer 'nope' does not exist"),
        (["--top_p=2"], "top_p=2.0 must be above 0 and at most 1"),
        (["--num_generations=0"], "num_generations=0 must be at least 1"),
        (["--out={model}/questions.jsonl"], "exists already; remove it or name another"),
        (["--question_column=nope"], "question_column='nope' is not in row 0"),
        (["--template=chat"], "the tokenizer has no chat template"),
        (["--slots=many"], "--slots"),
        (["--native=True"], "flag --native was renamed; use --kernels native (or off)"),
        ([], "--out"),
    ],
)
def test_bad_input_is_refused_in_one_line(model, tmp_path, monkeypatch, capsys, flags, complaint):
    given = [f"--model={model}", f"--prompts={model}/questions.jsonl"]
    if flags:
        given.append(f"--out={tmp_path}/out.jsonl")
    assert run(monkeypatch, *given, *(flag.format(model=model) for flag in flags)) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert complaint in err
    assert not (tmp_path / "out.jsonl").exists()
