"""Finds the packages: all of `rljax`, and the folder `kernels` under the name `rljax_kernels`."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["rljax", "rljax.*"]), "rljax_kernels"],
    package_dir={"rljax_kernels": "kernels"},
)
