"""A reward function that misbehaves costs its own samples, never the run."""

import functools
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from rljax.rewards import Scorer

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")

FAULTS = textwrap.dedent(
    """
    import math, os, re, subprocess, sys, threading, time

    def _each(completions):
        for c in completions:
            if c == "raise": raise RuntimeError("bad\\nsample")
            if c == "hang": time.sleep(1000)
            if c == "regex": re.match(r"(a+)+$", "a" * 40 + "b")  # holds the interpreter's lock
            if c == "exit": sys.exit(3)
            if c == "die": os._exit(7)
            if c == "interrupt": raise KeyboardInterrupt

    def fails(completions, **kwargs):
        _each(completions)
        return [1.0] * len(completions)

    VALUES = {"none": None, "nan": math.nan, "inf": -math.inf, "text": "1.0", "list": [1.0],
              "huge": 1e300, "true": True, "int": 2}

    def returns(completions):
        return [VALUES.get(c, 1.0) for c in completions]

    def short(completions):
        return [1.0] * (len(completions) - completions.count("short"))

    def not_a_list(completions):
        return 1.0

    def prints(completions):
        print("x" * 100_000)
        sys.stdout.write("\\x00\\x80\\n")
        sys.stdout.flush()
        os.write(1, b"raw" * 1000)
        subprocess.run(["echo", "from a child"])
        return [float(sys.stdin.read() == "")] * len(completions)

    def where(completions):
        assert threading.active_count() == 2  # this one and the one that reads
        assert threading.current_thread() is threading.main_thread()
        return [float(os.getpid())] * len(completions)

    also_where = where

    def loaded(completions):
        return [float("jax" in sys.modules or "numpy" in sys.modules)] * len(completions)

    calls = 0
    def counts(completions):
        global calls
        calls += 1
        return [float(calls)] * len(completions)

    def everything(prompts, completions, completion_ids, answer, level):
        return [p + c + str(i) + a == "pc[1, 2]a" and level == [3] for p, c, i, a in
                zip(prompts, completions, completion_ids, answer)]

    def by_keyword(**kwargs):
        return [float(sorted(kwargs) ==
                ["answer", "completion_ids", "completions", "level", "prompts"])]

    def needs_level(completions, level):
        return [1.0] * len(completions)

    def leaves_a_child(completions):
        child = subprocess.Popen(["sleep", "1000"])
        print(child.pid, flush=True)
        time.sleep(1000)
    """
)


@pytest.fixture
def faults(tmp_path):
    path = tmp_path / "faults.py"
    path.write_text(FAULTS)
    return lambda name: f"{path}:{name}"


def score(scorer, completions, **columns):
    n = len(completions)
    columns.setdefault("answer", ["1"] * n)
    return scorer(["p"] * n, completions, [[1, 2]] * n, columns)


@pytest.mark.smoke
def test_rewards_are_the_weighted_sum_and_scores_the_first_function(faults):
    with Scorer(["exact_match", faults("returns")], weights=[2.0, -0.5]) as scorer:
        result = score(scorer, ["1", "2", "int"])
    np.testing.assert_array_equal(result.scores, [1, 0, 0])
    np.testing.assert_array_equal(result.components, [[1, 1], [0, 1], [0, 2]])
    np.testing.assert_array_equal(result.rewards, [1.5, -0.5, -1.0])
    assert result.rewards.dtype == result.scores.dtype == result.components.dtype == np.float32
    assert result.valid.all() and result.valid.dtype == bool and result.failures == []


@pytest.mark.smoke
@pytest.mark.parametrize("fault", ["raise", "hang", "regex", "exit", "die", "interrupt"])
def test_a_call_that_fails_loses_only_the_guilty_sample(faults, fault, caplog):
    with Scorer([faults("fails"), "exact_match"], timeout_s=1) as scorer:
        result = score(scorer, ["1", fault, "1"])
        np.testing.assert_array_equal(result.valid, [True, False, True])
        np.testing.assert_array_equal(result.rewards, [2, 0, 2])
        np.testing.assert_array_equal(result.scores, [1, 0, 1])
        np.testing.assert_array_equal(result.components, [[1, 1], [np.nan, 0], [1, 1]])
        assert len(result.failures) == 1 and result.failures[0].startswith("fails, sample 1: ")
        assert "\n" not in result.failures[0]
        assert len(caplog.records) == 1 and "1 of 3 samples" in caplog.messages[0]
        assert scorer.failed == {"fails": 1}
        assert score(scorer, ["1", "1"]).valid.all()  # the process was started anew


def test_the_failure_says_what_happened_and_where(faults):
    with Scorer([faults("fails")], timeout_s=1) as scorer:
        result = score(scorer, ["raise", "exit", "die", "hang"])
    raised, left, died, hung = (line.partition(": ")[2] for line in result.failures)
    assert raised.startswith("RuntimeError: bad sample (faults.py:")
    assert left.startswith("SystemExit: 3 (")
    assert died == "ended its process (exit status 7)"
    assert hung == "took longer than 1 s"


def test_unusable_values_lose_their_samples_without_a_second_call(faults):
    with Scorer([faults("returns")]) as scorer:
        bad = ["none", "nan", "inf", "text", "list", "huge"]
        result = score(scorer, [*bad, "true", "int", "else"])
    np.testing.assert_array_equal(result.valid, [False] * 6 + [True] * 3)
    np.testing.assert_array_equal(result.rewards, [0] * 6 + [1, 2, 1])
    told = [line.partition(": ")[2] for line in result.failures]
    assert told[:3] == ["returned None", "returned nan", "returned -inf"]
    assert told[3] == "returned str instead of a number"


def test_a_wrong_number_of_values_is_traced_to_its_sample(faults):
    with Scorer([faults("short")]) as scorer:
        result = score(scorer, ["1", "short", "1"])
    np.testing.assert_array_equal(result.valid, [True, False, True])
    assert result.failures == ["short, sample 1: returned 0 values for 1 samples"]


def test_a_value_that_is_no_list_is_refused(faults):
    with Scorer([faults("not_a_list")]) as scorer:
        result = score(scorer, ["1"])
    assert result.failures == [
        "not_a_list, sample 0: returned float instead of a list of 1 numbers"
    ]


def test_a_function_that_always_hangs_is_given_up_for_the_batch(faults):
    with Scorer([faults("fails")], timeout_s=0.2, max_hangs=2) as scorer:
        start = time.monotonic()
        result = score(scorer, ["hang"] * 50)
        assert time.monotonic() - start < 5
        assert not result.valid.any()
        assert result.failures[-1].endswith("not tried, as 2 samples had hung before")


def test_slow_but_sound_functions_keep_their_samples(tmp_path, caplog):
    (tmp_path / "slow.py").write_text(
        "import time\ndef f(completions):\n    time.sleep(0.4 * len(completions))\n"
        "    return [1.0] * len(completions)\n"
    )
    with Scorer([f"{tmp_path}/slow.py:f"], timeout_s=1) as scorer:
        assert score(scorer, ["1"] * 3).valid.all()
    assert len(caplog.records) == 1 and "raise timeout_s" in caplog.messages[0]


def test_printing_disturbs_nothing_and_goes_where_it_is_asked(faults, tmp_path):
    with Scorer([faults("prints")], output=tmp_path / "out.log") as scorer:
        for _ in range(2):
            np.testing.assert_array_equal(score(scorer, ["1", "1"]).rewards, [1, 1])
    text = (tmp_path / "out.log").read_bytes()
    assert text.count(b"from a child") == 2 and text.count(b"x" * 100_000) == 2


def test_functions_run_alone_in_the_main_thread_of_a_light_process(faults):
    with Scorer([faults("where"), faults("loaded"), faults("also_where")]) as scorer:
        first, second = (score(scorer, ["1", "2"]).components for _ in range(2))
        assert scorer.names == ("where", "loaded", "also_where")
    np.testing.assert_array_equal(first, second)  # the same processes serve again
    assert first[0, 0] not in (os.getpid(), first[0, 2])
    assert first[0, 1] == 0


def test_a_process_keeps_its_state_and_is_called_once_a_batch(faults):
    with Scorer([faults("counts")]) as scorer:
        assert [score(scorer, ["1", "1"]).rewards.tolist() for _ in range(2)] == [[1, 1], [2, 2]]


def test_functions_get_all_columns_by_keyword_or_those_they_name(faults):
    with Scorer([faults("everything"), faults("by_keyword"), faults("short")]) as scorer:
        result = score(scorer, ["c"], answer=["a"], level=[3])
    np.testing.assert_array_equal(result.components, [[1, 1, 1]])


def test_functions_of_a_notebook_or_script_are_shipped(tmp_path):
    bonus = 0.25
    function = lambda completions, **_: [len(c) + bonus for c in completions]  # noqa: E731
    with Scorer([function]) as scorer:
        np.testing.assert_array_equal(score(scorer, ["ab"]).rewards, [2.25])
    script = tmp_path / "script.py"
    script.write_text(
        "from rljax.rewards import Scorer\n"
        "LENGTH = 3\n"
        "def length(completions): return [len(c) == LENGTH for c in completions]\n"
        "with Scorer([length]) as s: print(s(['p'], ['abc'], [[1]], {}).rewards)\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {**os.environ, "PYTHONPATH": root}
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment
    )
    assert run.stdout == "[1.]\n", run.stderr


def test_functions_and_names_mix_and_give_metrics_their_names(faults):
    def length(completions):
        return [float(len(c)) for c in completions]

    def longer(completions, than):
        return [float(len(c) > than) for c in completions]

    functions = [
        "exact_match",
        length,
        functools.partial(longer, than=1),
        faults("returns"),
        lambda completions: [0.5] * len(completions),
    ]
    with Scorer(functions, weights=[1, 1, 1, 0, 0]) as scorer:
        assert scorer.names == ("exact_match", "length", "longer", "returns", "lambda")
        result = score(scorer, ["1", "22"])
    np.testing.assert_array_equal(result.components, [[1, 1, 0, 1, 0.5], [0, 2, 1, 1, 0.5]])
    np.testing.assert_array_equal(result.rewards, [2, 3])


def test_a_function_that_cannot_be_sent_runs_here_and_costs_only_its_samples(caplog):
    lock = threading.Lock()  # cannot be pickled

    def guarded(completions):
        with lock:
            for completion in completions:
                if completion == "raise":
                    raise RuntimeError("no")
                if completion == "exit":
                    raise SystemExit(3)
            if "hang" in completions:
                time.sleep(0.5)
            return [1.0] * len(completions)

    with Scorer([guarded], timeout_s=0.2) as scorer:
        assert "guarded cannot be sent to a process of its own" in caplog.text
        np.testing.assert_array_equal(
            score(scorer, ["1", "raise", "exit", "1"]).valid, [True, False, False, True]
        )
        result = score(scorer, ["hang"])
        assert result.failures == ["guarded, sample 0: took longer than 0.2 s"]
        time.sleep(0.5)  # until it lets go of the lock
        assert score(scorer, ["1"]).valid.all()


def test_a_module_is_found_on_the_path(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def one(completions): return [1] * len(completions)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Scorer(["my_rewards:one"]) as scorer:
        assert score(scorer, ["1"]).rewards == [1]


def test_a_relative_path_still_holds_when_the_process_is_started_anew(
    faults, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with Scorer(["faults.py:fails"]) as scorer:
        monkeypatch.chdir("/")
        np.testing.assert_array_equal(score(scorer, ["die", "1"]).valid, [False, True])


@LINUX
def test_a_hung_functions_own_children_end_with_it(faults, tmp_path):
    log = tmp_path / "out.log"
    with Scorer([faults("leaves_a_child")], timeout_s=1.5, output=log) as scorer:
        score(scorer, ["1"])
        assert _ends(int(log.read_text()))


@LINUX
@pytest.mark.parametrize("fault", ["hang", "regex"])
def test_a_worker_ends_when_the_trainer_is_killed(faults, fault):
    script = (
        "import os, sys, threading, time\n"
        "from rljax.rewards import Scorer\n"
        f"s = Scorer([{faults('fails')!r}], timeout_s=1)\n"
        "print(s._functions[0]._process.pid, flush=True)\n"
        f"s(['p'], [{fault!r}], [[1]], {{}})\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(trainer.stdout.readline())
    time.sleep(0.3)
    assert _runs(pid)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert _ends(pid)


def _ends(pid):
    deadline = time.monotonic() + 5
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _runs(pid)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_empty_batch_scores_nothing(faults):
    with Scorer(["exact_match", faults("fails")]) as scorer:
        result = scorer([], [], [], {"answer": []})
    assert result.rewards.shape == (0,) and result.components.shape == (0, 2)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([], "give at least one"),
        ("exact_match", "is not a list"),
        (["exact"], "use one of exact_match"),
        (["nowhere.py:f"], "no file 'nowhere.py'"),
        (["no_such_module:f"], "No module named 'no_such_module'"),
        (["math:nothing"], "has no function 'nothing'"),
        ([":f"], "is not of the form"),
        ([3], "3 is not a reward function"),
        (["exact_match", "numeric", "exact_match"], "2 reward functions are called 'exact_match'"),
    ],
)
def test_functions_that_do_not_load_are_refused_in_one_line(functions, message):
    with pytest.raises(ValueError, match=message) as error:
        Scorer(functions)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def f(:", "SyntaxError"),
        ("def g(completions): pass", "it has g: fix the name"),
        ("raise RuntimeError('at import')", "RuntimeError: at import"),
        ("import os; os._exit(5)", "ended its process .exit status 5."),
    ],
)
def test_files_that_do_not_load_are_refused_in_one_line(tmp_path, body, message):
    (tmp_path / "bad.py").write_text(body)
    with pytest.raises(ValueError, match=message) as error:
        Scorer([f"{tmp_path}/bad.py:f"])
    assert "\n" not in str(error.value)


def test_misfit_arguments_are_refused(faults):
    with pytest.raises(ValueError, match="one finite weight for each"):
        Scorer(["exact_match"], weights=[1, 2])
    with pytest.raises(ValueError, match="timeout_s=0"):
        Scorer(["exact_match"], timeout_s=0)
    with Scorer(["exact_match", faults("needs_level")]) as scorer:
        scorer.check(["answer", "level"])
        with pytest.raises(ValueError, match="needs_level requires the argument 'level'"):
            scorer.check(["answer"])
        with pytest.raises(ValueError, match="rename the column"):
            scorer.check(["answer", "prompts"])
        with pytest.raises(ValueError, match="answer has 1 values for 2 prompts"):
            score(scorer, ["1", "1"], answer=["1"])
        assert not score(scorer, ["1"]).valid[0]  # called all the same, it costs the sample


def test_importing_rewards_loads_no_jax():
    code = "import sys, rljax.rewards; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(autouse=True)
def _warnings(caplog):
    caplog.set_level(logging.WARNING, "rljax")
