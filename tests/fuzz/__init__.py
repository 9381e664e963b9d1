"""A fuzzer: random models, losses, data, options and files, judged by a dense oracle.

``make fuzz SECONDS=600 SEED=1`` runs it for a while; `test_fuzz.py` runs a little of it with a
fixed seed. Every case is a function of two numbers, the seed and its own, so that it can be run
again: ``PYTHONPATH=tests python -m fuzz --seed 1 --case 1234``.
"""
