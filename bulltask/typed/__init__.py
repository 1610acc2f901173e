"""Conversion between Python's types and JSON, by type hints.

A :class:`bulltask.typed.converter.Converter` converts the values of one type. :mod:`bulltask.typed.build` makes one
from a type hint, and :class:`bulltask.typed.call.CallTypes` holds those of a function's parameters and return value.

The standard library's types have converters here, so that a program without pydantic sends and reads the same JSON.
pydantic converts its own types, models and constraints.
"""
