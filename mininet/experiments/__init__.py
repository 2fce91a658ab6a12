"""The paper's experiments, on racks of Mininet.

Each module is a program: ``sudo python3 -m experiments.table1``.
"""
