"""Measuring kernels, and keeping what was measured: the core of the demo, the command `bench` and `benchmarks/`.

`measure` checks and then times the contenders of one problem in turns; `document` writes the results as
pytest-benchmark's JSON; `results` reads them again and knows which were measured on older code; `bars` and `tables`
hold them to what was once reached and to the README.
"""
