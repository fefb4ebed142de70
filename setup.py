"""Builds the CPU kernels as one shared library; everything else is in pyproject.toml."""

from setuptools import setup

setup()
