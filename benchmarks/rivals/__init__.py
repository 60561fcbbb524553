"""Against other training servers and a bare loop, by turns: ``python -m benchmarks.rivals``, or ``make rivals``.

TuFT and SkyRL are installed from PyPI in environments of their own, each with a Tinker SDK that works with it, and are
driven through that SDK. ``benchmarks/README.md`` says how each is set up.
"""
