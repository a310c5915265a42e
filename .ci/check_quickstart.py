"""Check the final JSON line of the quickstart, read from its captured standard output.

Usage: check_quickstart.py OUTPUT
"""

import json
import pathlib
import sys

AIM_SECONDS = 180
MAX_SECONDS = 600
_NUMBERS = ("eval_before", "eval_after", "steps", "seconds")


def faults(output: str) -> list[str]:
    """What is wrong with the result.

    Args:
        output: The command's standard output.

    Returns:
        One line a fault; empty where all is well.
    """
    lines = output.strip().splitlines()
    last = lines[-1] if lines else ""
    try:
        result = json.loads(last)
    except ValueError:
        return [f"the last line is not JSON: {last!r}"]
    if not isinstance(result, dict):
        return [f"the last line is not a JSON object: {last!r}"]
    missing = [key for key in (*_NUMBERS, "run_dir") if key not in result]
    if missing:
        return [f"the last line lacks {', '.join(missing)}: {last}"]
    wrong = [key for key in _NUMBERS if not isinstance(result[key], int | float)]
    if wrong:
        return [f"not a number: {', '.join(wrong)}: {last}"]
    found = []
    if not result["eval_before"] < 0.5:
        found.append(f"eval_before is {result['eval_before']}, must be below 0.5")
    if not result["eval_after"] > 0.9:
        found.append(f"eval_after is {result['eval_after']}, must be above 0.9")
    if not result["seconds"] <= MAX_SECONDS:
        found.append(f"seconds is {result['seconds']}, must be at most {MAX_SECONDS}")
    if not pathlib.Path(str(result["run_dir"])).is_dir():
        found.append(f"run_dir {result['run_dir']!r} is not a directory")
    return found


def main() -> int:
    """Report on the output file named; exit status 1 where something is wrong."""
    output = pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")
    found = faults(output)
    for fault in found:
        print(f"quickstart: {fault}", file=sys.stderr)
    if found:
        return 1
    result = json.loads(output.strip().splitlines()[-1])
    verdict = "within" if result["seconds"] < AIM_SECONDS else "SLOWER THAN"
    print(
        f"quickstart: {result['eval_before']:.3f} -> {result['eval_after']:.3f} held out, "
        f"{result['steps']} steps, {result['seconds']:.0f} s ({verdict} the aim of {AIM_SECONDS} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
