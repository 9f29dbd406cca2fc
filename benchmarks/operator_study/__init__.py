"""The operator study of Hosseini, Simini and Vishwanath on this machine: `python -m benchmarks.operator_study`."""
