"""The scripts of `.ci`: what the README marks, and what the quickstart must say."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.smoke

CI = pathlib.Path(__file__).parents[1] / ".ci"


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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!-- ci: instal -->\n```bash\nx\n```\n", "'instal' is not known"),
        ("<!-- ci: test -->\nwords\n```bash\nx\n```\n", "1 times but before 0"),
        ("<!-- ci: test -->\n```python\nx\n```\n", "1 times but before 0"),
        ("<!-- ci: test -->\n```bash\nx\n```\n" * 2, "stands 2 times; use it once"),
    ],
)
def test_a_mark_that_would_be_passed_over_is_refused(text, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        readme_commands.marked_commands(text)


def _print(path, *arguments):
    return subprocess.run(
        [sys.executable, CI / "readme_commands.py", path, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_script_prints_or_fails_loudly(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(README)
    assert _print(path, "run").stdout == "echo one\n\necho two\n"
    missing = _print(path, "test")
    assert (
        missing.returncode == 1 and "no ```bash block after '<!-- ci: test -->'" in missing.stderr
    )
    path.write_text("")
    assert _print(path, "run", "--optional").returncode == 0
    assert _print(tmp_path / "none.md", "run").returncode == 1


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
