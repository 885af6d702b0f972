"""What bench_serve.py measures with: models of random weights, requests with the times of their tokens, a server's
clients, transformers' continuous batching, and the policy of a server that loads from a disk.
"""
