"""Check that a wheel holds every module and every file of data that the repository holds.

Usage: check_wheel.py WHEEL
"""

import pathlib
import sys
import zipfile

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = {"rljax": "rljax", "kernels": "rljax_kernels"}  # in the repository, and as installed
SUFFIXES = {".py", ".cpp", ".typed"}


def expected() -> set[str]:
    """The names that a wheel must hold."""
    return {
        f"{installed}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, installed in FOLDERS.items()
        for file in (ROOT / folder).rglob("*")
        if file.suffix in SUFFIXES
    }


def main() -> int:
    """Compare; exit status 1 where something is missing or too much."""
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    for name in sorted(expected() - held):
        print(f"wheel: {name} is missing", file=sys.stderr)
    for name in sorted(held - expected()):
        print(f"wheel: {name} does not belong there", file=sys.stderr)
    if held != expected():
        return 1
    print(f"wheel: all {len(held)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
