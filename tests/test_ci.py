"""The scripts of `.ci`: the commands that README and guides mark, the quickstart's result."""

import importlib.util
import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

pytestmark = pytest.mark.smoke

ROOT = pathlib.Path(__file__).parents[1]
CI = ROOT / ".ci"


def _load(name):
    spec = importlib.util.spec_from_file_location(name, CI / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


readme_commands = _load("readme_commands")
check_quickstart = _load("check_quickstart")

README = """# Title
<!-- ci: install -->
```bash
python3 -m venv .venv
pip install -e .
```
<!--ci:run-->

```bash
echo one
```
```bash
echo unmarked
```
<!-- ci: run -->
```bash
echo two
```
"""


def test_marked_blocks_are_found_in_order():
    assert readme_commands.marked_commands(README) == {
        "install": ["python3 -m venv .venv\npip install -e .\n"],
        "run": ["echo one\n", "echo two\n"],
    }


def test_a_block_that_is_skipped_says_why():
    skipped = "<!-- ci: skip: needs a TPU -->\n```bash\nx\n```\n"
    assert readme_commands.marked_commands(skipped) == {}
    with pytest.raises(ValueError, match="'skip' is not known"):
        readme_commands.marked_commands(skipped.replace(": needs a TPU", ""))


def test_python_becomes_a_command_that_runs_it():
    text = "<!-- ci: run -->\n```python\nprint('$HOME')\n```\n"
    ((command,),) = readme_commands.marked_commands(text).values()
    command = command.replace("python -", shlex.quote(sys.executable) + " -", 1)
    assert subprocess.run(["bash", "-c", command], capture_output=True).stdout == b"$HOME\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!-- ci: instal -->\n```bash\nx\n```\n", "'instal' is not known"),
        ("<!-- ci: test -->\nwords\n```bash\nx\n```\n", "1 times but right above 0"),
        ("<!-- ci: test -->\n```text\nx\n```\n", "1 times but right above 0"),
        ("<!-- ci: test -->\n```bash\nx\n```\n" * 2, "occurs 2 times; use it once"),
    ],
)
def test_a_mark_that_would_be_ignored_is_refused(text, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        readme_commands.marked_commands(text)


def _print(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["readme_commands.py", *map(str, arguments)])
    status = readme_commands.main()
    return status, *capsys.readouterr()


def test_the_script_prints_the_blocks_of_all_files(tmp_path, capsys, monkeypatch):
    readme, guide = tmp_path / "README.md", tmp_path / "guide.md"
    readme.write_text(README)
    guide.write_text("<!-- ci: run -->\n```bash\necho three\n```\n")
    printed = _print(capsys, monkeypatch, "run", readme, guide)
    assert printed == (0, "echo one\n\necho two\n\necho three\n", "")
    assert _print(capsys, monkeypatch, "install", readme, guide)[0] == 0


@pytest.mark.parametrize(
    ("mark", "names", "says"),
    [
        ("test", ["README.md"], "no block of commands after '<!-- ci: test -->'; add it"),
        ("install", ["README.md", "README.md"], "mark 'install' occurs 2 times; use it once"),
        ("run", ["README.md", "none.md"], "none.md"),
    ],
)
def test_the_script_fails_with_one_line(tmp_path, capsys, monkeypatch, mark, names, says):
    (tmp_path / "README.md").write_text(README)
    status, out, err = _print(capsys, monkeypatch, mark, *(tmp_path / name for name in names))
    assert (status, out) == (1, "")
    assert says in err and len(err.splitlines()) == 1


def test_every_command_of_the_guides_is_run():
    """A bash block is run, or says why not."""
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = file.read_text(encoding="utf-8")
        marked = len(re.findall(r"<!-- ci: (?:\w+|skip: .+) -->\n```bash", text))
        assert text.count("```bash") == marked, file.name


RESULT = {"eval_before": 0.31, "eval_after": 0.94, "steps": 300, "seconds": 120.0, "run_dir": "."}


def test_a_good_quickstart_has_no_faults():
    assert check_quickstart.faults("step 1\n" + json.dumps(RESULT) + "\n") == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"eval_before": 0.5}, "eval_before is 0.5, must be below 0.5"),
        ({"eval_after": 0.9}, "eval_after is 0.9, must be above 0.9"),
        ({"eval_after": float("nan")}, "eval_after is nan, must be above 0.9"),
        ({"seconds": 601}, "seconds is 601, must be at most 600"),
        ({"run_dir": "nowhere"}, "run_dir 'nowhere' is not a directory"),
        ({"steps": None}, "not a number: steps"),
    ],
)
def test_faults_of_a_quickstart_are_named(change, says):
    (fault,) = check_quickstart.faults(json.dumps(RESULT | change))
    assert fault.startswith(says)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("", "not JSON"),
        ('{"steps": 1}\nbye', "not JSON: 'bye'"),
        ("[1]", "not a JSON object"),
        ('{"steps": 1}', "lacks eval_before, eval_after, seconds, run_dir"),
    ],
)
def test_output_without_its_final_line_is_a_fault(output, says):
    (fault,) = check_quickstart.faults(output)
    assert says in fault
